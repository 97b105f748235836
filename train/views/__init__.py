"""What people read of runs: listing, logs, progress, plots, reports. Imports no torch."""
