"""Checkpoints: committed as a whole, or not there."""
