"""An asynchronous parameter server: many trainers, one model, no waiting for each other (HogWild).

    mpirun -n 3 python examples/parameter_server.py

Rank 0 serves the model. Every other rank trains it on data of its own: outputs come from the server by RPC,
the loss is computed at the trainer, gradients flow back to the server inside the trainer's own autograd
context, and a distributed optimizer applies them there. Trainers never wait for one another: their steps take
turns at the server, and a step may use gradients of parameters that another one has changed meanwhile. Such
gradients are a little old, never wrong: each forward pass works on a snapshot of the parameters.

The data are made here: random points that a small network can learn to tell apart. Prints a line per trainer
and, from rank 0, the accuracy on fresh points and ``OK: the trainers taught one model together``.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, optim
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd as dist_autograd
from mpirpc.optim import DistributedOptimizer

NUM_STEPS = 200
BATCH_SIZE = 32
NEEDED_ACCURACY = 0.9


def make_points(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Random points, and whether the first two features have the same sign."""
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return points, (points[:, 0] * points[:, 1] > 0).long()


class ParameterServer:
    """Holds the model, a network with one hidden layer; trainers reach it by RRef."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 32), (32,), (32, 2), (2,)]
        self.parameters = [torch.randn(shape, generator=generator).mul_(0.5) for shape in shapes]
        for parameter in self.parameters:
            parameter.requires_grad_()

    def forward(self, points: Tensor) -> Tensor:
        """Run the model on a snapshot, which stays as it is until this trainer's backward pass is over."""
        weight1, bias1, weight2, bias2 = [parameter.clone() for parameter in self.parameters]
        return torch.tanh(points @ weight1 + bias1) @ weight2 + bias2

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Give out references to the parameters, for the trainers' optimizers."""
        return [rpc.RRef(parameter) for parameter in self.parameters]


def train(server: rpc.RRef[ParameterServer], seed: int) -> str:
    """What each trainer does; runs on the trainers, started by rank 0."""
    optimizer = DistributedOptimizer(optim.Adam, server.rpc_sync().parameter_rrefs(), lr=0.01)
    for step in range(NUM_STEPS):
        points, labels = make_points(1000 * seed + step, BATCH_SIZE)
        with dist_autograd.context() as context_id:
            loss = functional.cross_entropy(server.rpc_sync().forward(points), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return f"{rpc.get_worker_info().name}: loss {loss.item():.3f} after {NUM_STEPS} steps"


def serve() -> int:
    """What rank 0 does: start the trainers, wait for them, and try the model on points nobody has seen."""
    server = rpc.RRef(ParameterServer())
    trainings = [rpc.rpc_async(worker, train, args=(server, worker.id)) for worker in trainers()]
    for training in trainings:
        print(training.wait(), flush=True)
    points, labels = make_points(seed=0, count=1000)
    with torch.no_grad():
        scores = server.local_value().forward(points)
    accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy on fresh points: {100 * accuracy:.1f} %")
    if accuracy < NEEDED_ACCURACY:
        print(f"FAILED: less than {100 * NEEDED_ACCURACY:.0f} %")
        return 1
    print("OK: the trainers taught one model together", flush=True)
    return 0


def trainers() -> list[rpc.WorkerInfo]:
    """Every worker but rank 0."""
    return rpc.get_worker_infos()[1:]


def main() -> int:
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        status = serve() if trainers() else refuse()
    rpc.shutdown()
    return status


def refuse() -> int:
    print("needs two or more ranks: mpirun -n 3 python examples/parameter_server.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
