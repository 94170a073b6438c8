"""The batch scripts of ``slurm/``, submitted to a real Slurm."""
