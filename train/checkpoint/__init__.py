"""Model and optimizer on the disk: committed, or not there."""
