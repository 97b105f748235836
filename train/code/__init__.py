"""The code of a run: which files a task needs, and where ranks import the run's copies from. Imports no torch."""
