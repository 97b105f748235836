"""What people read of runs: listing, logs, plots, reports. Imports no torch."""
