"""Proof on a GPU in minutes: see README.md. `python -m tests.gpu`, or `make test-gpu`."""
