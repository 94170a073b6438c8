"""Prints where each rank has been put, one line a rank; started by the batch scripts."""

import os

from mpi4py import MPI

cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
threads = os.environ.get("OMP_NUM_THREADS", "none")
world = MPI.COMM_WORLD
host = MPI.Get_processor_name()
line = f"rank {world.rank} of {world.size}: host {host}, cores {cores}, gpus {gpus}, threads {threads}"
lines = world.gather(line)
print(*(lines or []), sep="\n", end="\n" if lines else "", flush=True)
