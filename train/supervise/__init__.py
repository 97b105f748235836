"""Starts and watches the ranks of a run on this machine, and restarts them after a death."""
