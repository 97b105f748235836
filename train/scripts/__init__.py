"""Runs of a script: its check, its command line, its ranks and their signs of life, and where its metrics come from."""
