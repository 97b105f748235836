"""Hand runs to the engine of a cluster: Slurm, Kubernetes. Imports no torch."""
