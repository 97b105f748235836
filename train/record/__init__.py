"""The run folder: what a run leaves behind, and how it is read."""
