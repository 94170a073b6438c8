"""DistributedDataParallel and RPC in one model: trainers share a table on a parameter server.

    mpirun -n 4 python examples/ddp_rpc.py

Rank 0 keeps the sparse part of the model, a table of vectors, as a parameter server does. Every other rank is
a trainer: it looks up vectors by RPC and feeds them to the dense part, of which each trainer has a replica in
a DistributedDataParallel (DDP). One distributed backward pass does both: the table's gradients go back to
rank 0, and DDP averages those of the replicas over all trainers, with gloo. All gradients are in the autograd
context; a DistributedOptimizer steps the table with them, a local optimizer each replica.

DDP's gradients are means over the trainers. The table gets a step from each trainer, one after the other;
with SGD and the learning rate divided by the number of trainers, these sum up to the step of the mean, too.
So the mean of the trainers' losses is, at each step, the loss of one process that trains on all data, and
that is checked. It needs a barrier: no trainer may look up before all have made their steps. That none makes
its step before all have looked up is DDP's doing, whose backward pass waits for all.

The data are made here: bags of items, of which each is worth something or takes from it. gloo's trainers meet
in a file, so this program wants one machine, or a shared folder for temporary files. Prints the losses at a
few steps and, from rank 0, as the last line: ``OK: DDP and RPC together train as one process does``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.nn import RemoteModule
from mpirpc.optim import DistributedOptimizer

NUM_ITEMS, BAG_SIZE, WIDTH = 40, 6, 8
BATCH_SIZE = 64
"""Of each trainer, at each step."""
NUM_STEPS = 40
LEARNING_RATE = 0.5
TOLERANCE = 1e-9


def make_batch(trainer: int, step: int) -> tuple[Tensor, Tensor]:
    """Bags of items, ``(BATCH_SIZE, BAG_SIZE)``, and whether each is worth more than nothing.

    Even items are worth 1, odd ones take 1 away.
    """
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    bags = torch.randint(NUM_ITEMS, (BATCH_SIZE, BAG_SIZE), generator=generator)
    return bags, ((1 - 2 * (bags % 2)).sum(dim=1) > 0).long()


def make_table() -> nn.Module:
    """The sparse part: a vector for each item."""
    vectors = torch.randn(NUM_ITEMS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nn.Embedding.from_pretrained(vectors * 0.1, freeze=False)


def make_dense() -> nn.Module:
    """The dense part, with the same start values on every rank."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def compute_loss(table: nn.Module, dense: nn.Module, bags: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over some bags, with both parts of the model wherever they are."""
    return functional.cross_entropy(dense(table(bags).sum(dim=1)), labels)


def train(table: RemoteModule, meeting_file: str, trainer: int, num_trainers: int) -> list[float]:
    """What each trainer does; returns its losses. Runs on the trainers, started by rank 0."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=trainer, world_size=num_trainers
    )
    dense = DistributedDataParallel(make_dense())
    dense_optimizer = optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    table_optimizer = DistributedOptimizer(
        optim.SGD, table.remote_parameters(), lr=LEARNING_RATE / num_trainers
    )
    losses = []
    for step in range(NUM_STEPS):
        with autograd.context() as context_id:
            loss = compute_loss(table, dense, *make_batch(trainer, step))
            autograd.backward(context_id, [loss])  # ends when all trainers' gradients are averaged
            table_optimizer.step(context_id)
            gradients = autograd.get_gradients(context_id)
            for parameter in dense.parameters():
                parameter.grad = gradients[parameter]
            dense_optimizer.step()
        dist.barrier()  # the table has got the steps of all
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


def train_alone(num_trainers: int) -> list[float]:
    """The same training in one process, on the batches of all trainers at once."""
    table, dense = make_table(), make_dense()
    optimizer = optim.SGD([*table.parameters(), *dense.parameters()], lr=LEARNING_RATE)
    losses = []
    for step in range(NUM_STEPS):
        batches = [make_batch(trainer, step) for trainer in range(num_trainers)]
        bags, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = compute_loss(table, dense, bags, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def serve(trainers: list[rpc.WorkerInfo]) -> int:
    """What rank 0 does: make the table, start the trainers, compare. Returns an exit status."""
    table = RemoteModule(rpc.get_worker_info(), make_table)  # a handle; the table itself is here
    with tempfile.TemporaryDirectory() as folder:
        trainings = []
        for trainer, worker in enumerate(trainers):
            arguments = (table, f"{folder}/meeting", trainer, len(trainers))
            trainings.append(rpc.rpc_async(worker, train, args=arguments, timeout=0))  # takes what it takes
        by_trainer = [training.wait() for training in trainings]
    together = [sum(losses) / len(trainers) for losses in zip(*by_trainer, strict=True)]
    alone = train_alone(len(trainers))
    for step in range(0, NUM_STEPS, 13):
        print(f"step {step + 1}: loss {together[step]:.6f}, in one process {alone[step]:.6f}")
    difference = max(abs(a - b) for a, b in zip(together, alone, strict=True))
    print(f"the {NUM_STEPS} losses differ by {difference:.1e} at most")
    if not (difference < TOLERANCE and together[-1] < together[0]):
        print(f"FAILED: {TOLERANCE} is allowed, and losses go down", flush=True)
        return 1
    print("OK: DDP and RPC together train as one process does", flush=True)
    return 0


def main() -> int:
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        trainers = rpc.get_worker_infos()[1:]
        status = serve(trainers) if trainers else refuse()
    rpc.shutdown()  # the other ranks serve until here
    return status


def refuse() -> int:
    print("needs two or more ranks: mpirun -n 4 python examples/ddp_rpc.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
