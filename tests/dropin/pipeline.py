"""A pipeline: two shards of a network on two processes, several micro-batches under way."""

import itertools
import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.optim as optim
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

PROCESSES = 3
NUM_SPLITS = 4


class Shard(nn.Module):
    """One part of the network; micro-batches take turns in it."""

    def __init__(self, device, seed, *widths):
        super().__init__()
        self.lock = threading.Lock()
        self.device = device
        torch.manual_seed(seed)
        layers = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1]).to(device)

    def forward(self, x_rref):
        x = x_rref.to_here().to(self.device)
        with self.lock:
            out = self.layers(x)
        return out.cpu()

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class PipelinedNet(nn.Module):
    def __init__(self, split_size, workers):
        super().__init__()
        self.split_size = split_size
        self.first_rref = rpc.remote(workers[0], Shard, args=("cpu", 1, 10, 16, 16))
        self.second_rref = rpc.remote(workers[1], Shard, args=("cpu", 2, 16, 16, 4))

    def forward(self, inputs):
        out_futures = []
        for x in iter(inputs.split(self.split_size, dim=0)):
            x_rref = RRef(x)
            y_rref = self.first_rref.remote().forward(x_rref)
            out_futures.append(self.second_rref.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self):
        rrefs = list(self.first_rref.remote().parameter_rrefs().to_here())
        rrefs.extend(self.second_rref.remote().parameter_rrefs().to_here())
        return rrefs


def run_master():
    model = PipelinedNet(8 // NUM_SPLITS, ["worker1", "worker2"])
    loss_fn = nn.MSELoss()
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.05)
    generator = torch.Generator().manual_seed(9)
    for batch in range(4):
        inputs = torch.randn(8, 10, generator=generator)
        labels = torch.randn(8, 4, generator=generator)
        with dist_autograd.context() as context_id:
            loss = loss_fn(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        print(f"batch {batch}: loss {loss.item():.5f}")


def run_worker(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    name = "master" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_master()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(PROCESSES,), nprocs=PROCESSES, join=True)
