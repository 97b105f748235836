"""Run folders and the processes that belong to them."""
