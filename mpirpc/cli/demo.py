"""``mpirun -n 4 python -m mpirpc demo``: train a network that is split over workers on real images.

Who does what, with four ranks or more (with fewer, the last rank takes the roles that are left)::

    rank 0   trainer     shuffles, asks the layers for outputs, runs backward pass and optimizer step
    rank 1   front       first layers, a RemoteModule
    rank 2   head        last layer, a RemoteModule
    rank 3   evaluation  sends the test images through both by RRef while training goes on

The data are the 1,797 handwritten digits that scikit-learn ships.

Rules for this file: public API only, as in a user's program; one seed decides everything, whatever the number
of ranks.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.cli.terminal import terminal
from mpirpc.nn import RemoteModule
from mpirpc.optim import DistributedOptimizer

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

HELP = "train a network split over the workers on handwritten digits"

NUM_TEST_IMAGES = 360
"""Of the 1,797 images; the others are trained on."""

MOMENTUM = 0.9

TOLERANCE = 1e-5
"""Largest difference of a loss between the distributed and the one-process run that ``--check`` accepts."""

ONE_RANK = """\
the demo needs two or more MPI ranks, and this job has one
hint: start it with: mpirun -n 4 python -m mpirpc demo"""

NO_SKLEARN = """\
the demo needs scikit-learn for its images, and it is not installed
hint: pip install mpirpc[demo]"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``demo``."""
    parser.add_argument("--epochs", type=_positive(int), default=20, help="passes over the images (20)")
    parser.add_argument("--batch-size", type=_positive(int), default=64, help="images a step (64)")
    parser.add_argument("--lr", type=_positive(float), default=0.1, help="learning rate (0.1)")
    parser.add_argument("--seed", type=int, default=0, help="decides split, start values and order (0)")
    parser.add_argument(
        "--check", action="store_true", help="train in one process too, and fail if the losses differ"
    )


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its errors
    return parse


def run(arguments: argparse.Namespace) -> int:
    """Run the demo on this rank: rank 0 drives, the others serve until it is over.

    Returns:
        Exit status: 0, 1 for a failed check or a missing package, 2 for a job of one rank.
    """
    torch.set_num_threads(1)  # ranks share a machine and the network is tiny; also keeps sums in one order
    rpc.init_rpc()
    try:
        return _drive(arguments) if rpc.get_worker_info().id == 0 else 0
    finally:
        rpc.shutdown()


def _drive(arguments: argparse.Namespace) -> int:
    """What rank 0 does."""
    workers = rpc.get_worker_infos()
    if len(workers) < 2:
        return _refuse(ONE_RANK, 2)
    digits = _load_digits(arguments.seed)
    if digits is None:
        return _refuse(NO_SKLEARN, 1)
    roles = Roles.of(workers)
    print(f"{len(workers)} workers: {roles}", flush=True)
    start = time.perf_counter()
    losses = train_distributed(arguments, digits, roles)
    _print_totals(workers, time.perf_counter() - start)
    return _check(losses, train_locally(arguments, digits)) if arguments.check else 0


def _refuse(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status


@dataclass(frozen=True, slots=True)
class Roles:
    """Which worker has which role."""

    trainer: rpc.WorkerInfo
    front: rpc.WorkerInfo
    head: rpc.WorkerInfo
    evaluation: rpc.WorkerInfo

    @classmethod
    def of(cls, workers: list[rpc.WorkerInfo]) -> Roles:
        """Deal the roles to the first ranks; the last rank takes those that are left."""
        return cls(*(workers[min(role, len(workers) - 1)] for role in range(4)))

    def __str__(self) -> str:
        return (
            f"trainer on {self.trainer.name}, front layers on {self.front.name}, head on {self.head.name}, "
            f"evaluation on {self.evaluation.name}"
        )


# --- data and network, the same for the distributed and the local run ---


@dataclass(frozen=True, slots=True)
class Digits:
    """The images, ``(n, 64) float32`` from 0 to 1, and their digits, ``(n,) int64``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _load_digits(seed: int) -> Digits | None:
    """Load and split the images; None without scikit-learn."""
    try:
        datasets = importlib.import_module("sklearn.datasets")  # slow, and for rank 0 only
    except ImportError:
        return None
    raw = datasets.load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32) / 16
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=_generator(seed))
    test, train = order[:NUM_TEST_IMAGES], order[NUM_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Front(nn.Module):
    """First layers: image to features."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        _reset_parameters(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(n, 64)`` to ``(n, 64)``."""
        features: Tensor = self.layers(images)
        return features


class Head(nn.Module):
    """Last layer: features to one score a digit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        _reset_parameters(self, seed + 1)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``(n, 64)`` to ``(n, 10)``."""
        scores: Tensor = self.layer(features)
        return scores


def _reset_parameters(module: nn.Module, seed: int) -> None:
    """Draw all parameters from a generator of the module's own.

    torch's default generator would make them depend on what else runs on the worker.
    """
    generator = _generator(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)


def _batches(arguments: argparse.Namespace, digits: Digits, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(digits.train_labels), generator=_generator(arguments.seed + epoch))
    for start in range(0, len(order), arguments.batch_size):
        chosen = order[start : start + arguments.batch_size]
        yield digits.train_images[chosen], digits.train_labels[chosen]


# --- the distributed run ---


def train_distributed(arguments: argparse.Namespace, digits: Digits, roles: Roles) -> list[float]:
    """Train over the workers, print progress and the test accuracy, and return the loss of every step."""
    front = RemoteModule(f"rank:{roles.front.id}/cpu", Front, args=(arguments.seed,))
    head = RemoteModule(f"rank:{roles.head.id}/cpu", Head, args=(arguments.seed,))
    parameters = front.remote_parameters() + head.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=arguments.lr, momentum=MOMENTUM)
    evaluation = Evaluation(roles.evaluation, [front, head], digits)
    losses: list[float] = []
    with _make_progress(arguments.epochs) as progress:
        for epoch in range(1, arguments.epochs + 1):
            for images, labels in _batches(arguments, digits, epoch):
                losses.append(_train_step(front, head, optimizer, images, labels))
            evaluation.start_unless_busy(epoch)
            progress.show(epoch, losses[-1], evaluation.latest)
    print(f"test accuracy: {100 * evaluation.wait_for_last():.1f} % of {NUM_TEST_IMAGES} images", flush=True)
    return losses


def _train_step(
    front: RemoteModule, head: RemoteModule, optimizer: DistributedOptimizer, images: Tensor, labels: Tensor
) -> float:
    with autograd.context() as context_id:
        loss = functional.cross_entropy(head(front(images)), labels)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
        return loss.item()


class Evaluation:
    """The trainer's side of the evaluation: starts one when none is running, and never waits before the end.

    Attributes:
        latest: What is known of the test accuracy, as a text.
    """

    def __init__(self, worker: rpc.WorkerInfo, parts: list[RemoteModule], digits: Digits) -> None:
        rrefs = [part.get_module_rref() for part in parts]
        self._evaluator = rpc.remote(worker, Evaluator, args=(rrefs, digits.test_images, digits.test_labels))
        self._running: torch.futures.Future[float] | None = None
        self._epoch = 0  # after which the running one was started
        self.latest = ""

    def start_unless_busy(self, epoch: int) -> None:
        """Take in the result of the running evaluation if there is one, and then start the next."""
        if self._running is not None:
            if not self._running.done():
                return
            self.latest = f"test accuracy {100 * self._running.value():.1f} % (epoch {self._epoch})"
        self._running = self._evaluator.rpc_async().accuracy()
        self._epoch = epoch

    def wait_for_last(self) -> float:
        """Evaluate what training came to."""
        if self._running is not None:
            self._running.wait()
        accuracy: float = self._evaluator.rpc_sync().accuracy()
        return accuracy


class Evaluator:
    """Lives on the evaluation worker: knows the test images, and the parts of the network by RRef."""

    def __init__(self, parts: list[rpc.RRef[nn.Module]], images: Tensor, labels: Tensor) -> None:
        self._parts = parts
        self._images = images
        self._labels = labels

    def accuracy(self) -> float:
        """Send all test images through the network as it is now; returns the fraction that it reads right."""
        values = self._images
        for part in self._parts:
            values = rpc.rpc_sync(part.owner(), _run_without_grad, args=(part, values))
        return (values.argmax(dim=1) == self._labels).float().mean().item()


def _run_without_grad(part: rpc.RRef[nn.Module], values: Tensor) -> Tensor:
    """At a part's owner: run it and record nothing, so that training does not notice."""
    with torch.no_grad():
        outputs: Tensor = part.local_value()(values)
        return outputs


# --- the run in one process, and the comparison ---


def train_locally(arguments: argparse.Namespace, digits: Digits) -> list[float]:
    """Train the same network in this process only; returns the loss of every step."""
    network = nn.Sequential(Front(arguments.seed), Head(arguments.seed))
    optimizer = torch.optim.SGD(network.parameters(), lr=arguments.lr, momentum=MOMENTUM)
    losses = []
    for epoch in range(1, arguments.epochs + 1):
        for images, labels in _batches(arguments, digits, epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(images), labels)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


def _check(distributed: list[float], local: list[float]) -> int:
    """Compare the two series of losses; returns the exit status."""
    print(f"last loss: {distributed[-1]:.9f} over the workers, {local[-1]:.9f} in one process")
    difference = max(abs(a - b) for a, b in zip(distributed, local, strict=True))
    print(f"largest loss difference: {difference:.1e}", flush=True)
    if difference <= TOLERANCE:
        return 0
    return _refuse(f"the losses differ by more than {TOLERANCE:.0e}", 1)


# --- what the user sees ---


class _Lines:
    """Progress as one plain line an epoch, for logs."""

    def __init__(self, num_epochs: int) -> None:
        self._num_epochs = num_epochs

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, epoch: int, loss: float, note: str) -> None:
        print(f"epoch {epoch:2}/{self._num_epochs}  loss {loss:.4f}  {note}".rstrip(), flush=True)


class _Bar(_Lines):
    """Progress as a bar, for terminals."""

    def __init__(self, num_epochs: int, terminal: TextIO) -> None:
        super().__init__(num_epochs)
        # A rank's terminal often does not know its size; tqdm would take that for no room at all.
        columns, rows = shutil.get_terminal_size(fallback=(100, 24))
        self._bar = tqdm(total=num_epochs, unit="epoch", file=terminal, ncols=columns, nrows=rows)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, epoch: int, loss: float, note: str) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4f} {note}".rstrip(), refresh=False)
        self._bar.update(1)


def _make_progress(num_epochs: int) -> _Lines:
    stream = terminal()
    return _Bar(num_epochs, stream) if stream is not None and tqdm is not None else _Lines(num_epochs)


def _print_totals(workers: list[rpc.WorkerInfo], seconds: float) -> None:
    """Sum the counters of all workers."""
    totals = [rpc.rpc_sync(worker, rpc.debug_info) for worker in workers]
    calls, nbytes = (_total(totals, key) for key in ("calls_sent", "bytes_sent"))
    print(f"{calls} RPCs made, {nbytes / 1e6:.1f} MB moved, {seconds:.1f} s", flush=True)


def _total(infos: list[Mapping[str, Any]], key: str) -> int:
    return sum(int(info[key]) for info in infos)
