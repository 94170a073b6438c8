"""Distributed autograd from end to end, in the smallest program that shows it.

    mpirun -n 2 python examples/dist_autograd_simple.py

Every rank is a trainer, all at the same time. Each makes two random parameters on the next rank, adds them up
at home, runs the backward pass back to where they live, and lets a distributed optimizer change them there.

Prints a line per rank and, at the end, from rank 0: ``OK: every trainer moved its remote parameters``.
"""

from __future__ import annotations

import torch
from torch import Tensor, optim

import mpirpc as rpc
from mpirpc import autograd as dist_autograd
from mpirpc.optim import DistributedOptimizer

LEARNING_RATE = 0.05


def random_parameter() -> Tensor:
    return torch.rand((3, 3), requires_grad=True)


def train_once(neighbour: str) -> float:
    """Forward pass, backward pass and optimizer step over parameters on ``neighbour``; returns the loss."""
    with dist_autograd.context() as context_id:
        # Forward pass: the parameters stay with the neighbour, copies of their values come here.
        first = rpc.remote(neighbour, random_parameter)
        second = rpc.remote(neighbour, random_parameter)
        before = [first.to_here(), second.to_here()]
        loss = (before[0] + before[1]).sum()
        # The gradient of a sum is one everywhere.
        expected = [value.detach() - LEARNING_RATE for value in before]

        # Backward pass: the gradients go to the neighbour, and stay there, in this context.
        dist_autograd.backward(context_id, [loss])

        # Optimizer: made and stepped where the parameters are.
        optimizer = DistributedOptimizer(optim.SGD, [first, second], lr=LEARNING_RATE)
        optimizer.step(context_id)

        for new, value in zip([first.to_here(), second.to_here()], expected, strict=True):
            torch.testing.assert_close(new, value)
        return loss.item()


def main() -> None:
    rpc.init_rpc()
    me = rpc.get_worker_info()
    neighbour = neighbour_of(me)
    loss = train_once(neighbour)
    print(f"{me.name}: loss {loss:.4f} from parameters on {neighbour}, one step done", flush=True)
    rpc.shutdown()  # waits until every rank has come here
    if me.id == 0:
        print("OK: every trainer moved its remote parameters", flush=True)


def neighbour_of(me: rpc.WorkerInfo) -> str:
    """The next rank's name; after the last comes rank 0."""
    workers = rpc.get_worker_infos()
    return workers[(me.id + 1) % len(workers)].name


if __name__ == "__main__":
    main()
