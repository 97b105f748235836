"""Observe runs and GPUs from outside, for `train top` and `train exporter`. Imports no torch."""
