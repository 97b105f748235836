"""What people read about runs: listing, logs, plots, reports. Imports no torch."""
