"""Runs and GPUs as seen from outside, for `train top` and `train exporter`. Imports no torch."""
