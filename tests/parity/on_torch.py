"""One of the two workers that run the programs on torch.distributed.rpc. Arguments: rank, results file."""

import sys
import warnings

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from tests.parity import programs


def main():
    rank, file = int(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    programs.use(rpc, dist_autograd, DistributedOptimizer)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        torch.save(programs.run_all(), file)
    rpc.shutdown()


if __name__ == "__main__":
    main()
