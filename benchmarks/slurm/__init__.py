"""Ten kinds of interruption on a real SLURM cluster of three nodes: `python -m benchmarks.slurm`."""
