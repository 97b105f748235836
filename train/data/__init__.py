"""From a seed to batches: which sample is seen when, and how it gets to the device."""
