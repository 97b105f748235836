"""The ranks of a run on this machine: started, watched, and started again after a death."""

WAIT_MINUTES = 30.0
"""Default of --wait-minutes: how long a node waits for the others."""
