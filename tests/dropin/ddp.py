"""DDP and RPC in one model: trainers have replicas of the dense part, and share a table on a server."""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

PROCESSES = 3
TRAINERS = [0, 1]
SERVER = 2

WORDS, WIDTH, CLASSES = 30, 5, 3
STEPS = 5

trainers_group = None


class Table(nn.Module):
    """The sparse part: the sum of the vectors of a sentence's words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum").double()

    def forward(self, words, offsets):
        return self.bag(words, offsets)


class SentenceNet(nn.Module):
    """A remote table below, a replica of the dense part on top."""

    def __init__(self, table):
        super().__init__()
        torch.manual_seed(5)
        dense = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.table = table
        self.dense = DDP(dense, process_group=trainers_group)

    def forward(self, words, offsets):
        return self.dense(self.table.forward(words, offsets))

    def parameter_rrefs(self):
        return [*self.table.remote_parameters(), *map(rpc.RRef, self.dense.parameters())]


def sentences(generator):
    lengths = torch.randint(1, 6, (4,), generator=generator)
    words = torch.randint(WORDS, (int(lengths.sum()),), generator=generator)
    offsets = lengths.cumsum(0) - lengths
    return words, offsets, torch.randint(CLASSES, (4,), generator=generator)


def train(rank, table):
    """Run by the trainers, both at once; no one looks up words before both have made their steps."""
    net = SentenceNet(table)
    optimizer = DistributedOptimizer(optim.SGD, net.parameter_rrefs(), lr=0.2)
    generator = torch.Generator().manual_seed(rank)
    figures = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            words, offsets, classes = sentences(generator)
            loss = F.cross_entropy(net(words, offsets), classes)
            dist_autograd.backward(context_id, [loss])
            gradients = dist_autograd.get_gradients(context_id)
            total = sum(gradients[parameter].abs().sum().item() for parameter in net.dense.parameters())
            optimizer.step(context_id)
        dist.barrier(group=trainers_group)
        figures.append((loss.item(), total))
    return figures


def serve():
    table = RemoteModule("server/cpu", Table)
    futures = [rpc.rpc_async(f"trainer{rank}", train, args=(rank, table)) for rank in TRAINERS]
    for step, figures in enumerate(zip(*[future.wait() for future in futures], strict=True)):
        (first, total), (second, same) = figures
        assert total == same  # DDP has averaged them
        print(f"step {step}: losses {first:.6f} {second:.6f}, gradients of the dense part {total:.6f}")


def run(rank, world_size):
    global trainers_group
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    dist.init_process_group("gloo")
    trainers_group = dist.new_group(TRAINERS)
    name = "server" if rank == SERVER else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == SERVER:
        serve()
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(PROCESSES,), nprocs=PROCESSES, join=True)
