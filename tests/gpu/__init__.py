"""Proof on a GPU in minutes: see docs/gpu.md. `python -m tests.gpu`, or `make test-gpu`."""
