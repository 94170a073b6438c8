"""Batched calls: a parameter server that takes a gradient from every trainer and answers all of them at once.

    mpirun -n 3 python examples/batch_rpc.py

Rank 0 keeps the model, a classifier of handwritten digits. Each other rank is a trainer with an equal share
of the images. A trainer computes gradients on its share, sends them to the server and waits for parameters.
The server's method is marked with ``async_execution``: it returns a future at once, which gives the thread
back, and all the answers leave when the last trainer's gradients have come and the averaged step is made.
Without the mark, each waiting trainer would hold a thread of the server.

The mean of gradients over equal shares is the gradient over all images. So the same steps are made once more
in one process, on all images at once, and the parameters are compared. Prints the losses and, from rank 0, as
the last line: ``OK: batched updates are those of one process``.
"""

from __future__ import annotations

import importlib
import sys
import threading

import torch
from torch import Tensor, nn, optim
from torch.futures import Future
from torch.nn import functional

import mpirpc as rpc
from mpirpc.functions import async_execution

NUM_STEPS = 30
LEARNING_RATE = 0.5
TOLERANCE = 1e-9


def load_images() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that scikit-learn ships, ``(n, 64)`` from 0 to 1, and what they show."""
    digits = importlib.import_module("sklearn.datasets").load_digits()  # slow, and for rank 0 only
    return torch.tensor(digits.data, dtype=torch.float64) / 16, torch.tensor(digits.target)


def make_model() -> nn.Module:
    """The same model whenever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def compute_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, list[Tensor]]:
    """The mean loss over these images, and its gradients."""
    loss = functional.cross_entropy(model(images), labels)
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


class ParameterServer:
    """Keeps the model; trainers reach it by RRef.

    Args:
        num_trainers: How many gradients make a step.
    """

    def __init__(self, num_trainers: int) -> None:
        self.model = make_model()
        self.optimizer = optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.num_trainers = num_trainers
        self.mutex = threading.Lock()  # around the next two: calls run on several threads
        self.gradients: dict[int, list[Tensor]] = {}  # by trainer, of the step that is being collected
        self.answer: Future[list[Tensor]] = Future()  # the parameters after that step

    @async_execution
    def update(self, trainer: int, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Take one trainer's gradients; the answer is the parameters after the step of all trainers."""
        with self.mutex:
            answer = self.answer
            self.gradients[trainer] = gradients
            if len(self.gradients) < self.num_trainers:
                return answer
            collected = [self.gradients[key] for key in sorted(self.gradients)]  # sums in one order
            self.gradients, self.answer = {}, Future()
        answer.set_result(self.step(collected))  # all the answers leave now
        return answer

    def step(self, collected: list[list[Tensor]]) -> list[Tensor]:
        """Apply the mean of all trainers' gradients."""
        for parameter, parts in zip(self.model.parameters(), zip(*collected, strict=True), strict=True):
            parameter.grad = torch.stack(parts).mean(dim=0)
        self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def train(server: rpc.RRef[ParameterServer], trainer: int, images: Tensor, labels: Tensor) -> list[float]:
    """What each trainer does; returns its losses. Runs on the trainers, started by rank 0."""
    model = make_model()
    losses = []
    for _ in range(NUM_STEPS):
        loss, gradients = compute_gradients(model, images, labels)
        parameters = server.rpc_sync().update(trainer, gradients)
        with torch.no_grad():
            for old, new in zip(model.parameters(), parameters, strict=True):
                old.copy_(new)
        losses.append(loss)
    return losses


def train_alone(images: Tensor, labels: Tensor) -> nn.Module:
    """The same steps in one process: the mean over all images."""
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def serve(trainers: list[rpc.WorkerInfo]) -> int:
    """What rank 0 does: start the trainers, wait for them, compare. Returns an exit status."""
    try:
        images, labels = load_images()
    except ImportError:
        print("needs scikit-learn for its images: pip install mpirpc[demo]", file=sys.stderr)
        return 1
    share = len(images) // len(trainers)
    images, labels = images[: share * len(trainers)], labels[: share * len(trainers)]
    server = ParameterServer(len(trainers))
    trainings = []
    for trainer, worker in enumerate(trainers):
        part = slice(trainer * share, (trainer + 1) * share)
        arguments = (rpc.RRef(server), trainer, images[part], labels[part])
        trainings.append(rpc.rpc_async(worker, train, args=arguments, timeout=0))  # takes what it takes
    for worker, training in zip(trainers, trainings, strict=True):
        losses = training.wait()
        print(f"{worker.name}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)

    alone = train_alone(images, labels)
    pairs = zip(server.model.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"after {NUM_STEPS} steps the parameters differ by {difference:.1e} from those of one process")
    if not difference < TOLERANCE:
        print(f"FAILED: {TOLERANCE} is allowed", flush=True)
        return 1
    print("OK: batched updates are those of one process", flush=True)
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
    print("needs two or more ranks: mpirun -n 3 python examples/batch_rpc.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
