"""Engines of clusters that start runs: Slurm, Kubernetes. Imports no torch."""
