"""Several machines: where they meet, that they run the same, who is there and who is missing. Imports no torch."""

WAIT_MINUTES = 30.0
"""Default of --wait-minutes: how long a node waits for the others."""
