"""A training that is stopped and goes on later as if nothing had been: a split model in one checkpoint file.

    mpirun -n 3 python examples/checkpoint_resume.py                                   # all in one run
    mpirun -n 3 python examples/checkpoint_resume.py --checkpoint run.pt --stop-at 10  # a job that stops
    mpirun -n 2 python examples/checkpoint_resume.py --checkpoint run.pt --resume      # and one that goes on

Rank 0 trains a network on handwritten digits: its first layers are RemoteModules on the other ranks, its last
layer is here. It drops random features, so the random generators are part of the state. A checkpoint holds
the model, the optimizer (Adam), the learning rate's scheduler, the random generators and the losses so far;
it is written beside its place and then moved there, so the file is whole at every moment, whatever stops the
job. Its contents are those of the same model in one process: the second job may have other ranks.

Without options it trains once in one go, then again, stopped in the middle and resumed with fresh objects,
and compares all losses. Prints the losses at a few steps and, from rank 0, as the last line:
``OK: resumed and uninterrupted training differ by 0.0``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.nn import RemoteModule, full_parameters, full_state_dict, load_full_state_dict
from mpirpc.optim import DistributedOptimizer

NUM_STEPS = 20
BATCH_SIZE = 64
SEEDING = threading.Lock()
"""Held while a layer draws its start values: two may be made on one worker at the same time."""


@functools.cache
def load_images() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that scikit-learn ships, ``(n, 64)`` from 0 to 1, and what they show."""
    datasets = importlib.import_module("sklearn.datasets")  # slow, and for rank 0 only
    digits = datasets.load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def make_layer(seed: int, inputs: int, outputs: int) -> nn.Module:
    """A layer whose start values depend on the seed alone; runs where the layer is to live."""
    with SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


class Network(nn.Module):
    """Two layers on other ranks and a head here."""

    def __init__(self) -> None:
        super().__init__()
        others = rpc.get_worker_infos()[1:]
        self.first = RemoteModule(others[0], make_layer, (1, 64, 64))
        self.second = RemoteModule(others[-1], make_layer, (2, 64, 32))
        self.drop = nn.Dropout(0.2)
        self.head = make_layer(3, 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Run the images through all layers, wherever these are."""
        features = functional.relu(self.second(functional.relu(self.first(images))))
        scores: Tensor = self.head(self.drop(features))
        return scores


class Training:
    """Everything that a training is made of, at its start."""

    def __init__(self) -> None:
        self.images, self.labels = load_images()
        self.model = Network()
        self.optimizer = DistributedOptimizer(optim.Adam, full_parameters(self.model), lr=0.001)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.02, total_steps=NUM_STEPS + 1)
        self.order = torch.Generator().manual_seed(0)  # which images are in a batch
        torch.manual_seed(0)  # which features are dropped
        self.losses: list[float] = []
        self.latest = self.snapshot()

    def step(self) -> None:
        """Train on one batch."""
        batch = torch.randint(len(self.images), (BATCH_SIZE,), generator=self.order)
        with autograd.context() as context_id:
            loss = functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
            autograd.backward(context_id, [loss])
            self.optimizer.clip_grad_norm(context_id, max_norm=1.0)
            self.optimizer.step(context_id)
        self.scheduler.step()
        self.losses.append(loss.item())

    def run(self, until: int) -> None:
        """Train until so many steps are done in all."""
        while len(self.losses) < until:
            self.step()
            self.latest = self.snapshot()
            if len(self.losses) % 5 == 0:
                print(f"  step {len(self.losses)}: loss {self.losses[-1]:.4f}", flush=True)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Gather everything from all ranks."""
        return {
            "model": full_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "order": self.order.get_state(),
            "losses": self.losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring everything back, each part to its rank."""
        load_full_state_dict(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        self.order.set_state(state["order"])
        self.losses = state["losses"]

    def snapshot(self) -> tuple[int, bytes]:
        """Return how many steps are done, and the checkpoint of this moment, gathered on this rank."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return len(self.losses), buffer.getvalue()

    def save(self, path: Path) -> None:
        """Write the checkpoint of the last finished step; asks no other rank for anything.

        Whoever reads ``path`` finds the old one or the new one, never a part.
        """
        num_steps, data = self.latest
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        print(f"  step {num_steps}: saved in {path.name}, {len(data) // 1024} KiB", flush=True)

    def load(self, path: Path) -> None:
        """Read a checkpoint."""
        self.load_state_dict(torch.load(path, weights_only=True))
        self.latest = self.snapshot()
        print(f"  step {len(self.losses)}: resumed from {path.name}", flush=True)


def show(path: Path) -> int:
    """Train in one go, and again with a stop in the middle; compare. Returns an exit status."""
    print("in one go:", flush=True)
    whole = Training()
    whole.run(NUM_STEPS)

    print("with a stop in the middle:", flush=True)
    first_half = Training()
    first_half.run(NUM_STEPS // 2)
    first_half.save(path)
    second_half = Training()  # new layers, new local optimizers, everything at its start
    second_half.load(path)
    second_half.run(NUM_STEPS)

    difference = max(abs(a - b) for a, b in zip(whole.losses, second_half.losses, strict=True))
    verdict = "OK" if difference == 0 else "FAILED"
    print(f"{verdict}: resumed and uninterrupted training differ by {difference}", flush=True)
    return 0 if difference == 0 else 1


def train(path: Path, resume: bool, stop_at: int) -> None:
    """Train from the start or from a checkpoint; leave a checkpoint, also when told to end before."""
    training = Training()
    if resume:
        training.load(path)
    rpc.on_terminate(lambda: training.save(path))
    training.run(stop_at)
    training.save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="train once, and save here at the end"
    )
    parser.add_argument("--resume", action="store_true", help="begin with what the file holds")
    parser.add_argument("--stop-at", type=int, default=NUM_STEPS, help=f"steps in all ({NUM_STEPS})")
    arguments = parser.parse_args()
    if arguments.resume and arguments.checkpoint is None:
        parser.error("--resume needs --checkpoint FILE")
    torch.set_num_threads(1)  # sums in one order

    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        status = drive(arguments)
    rpc.shutdown()  # the other ranks serve until here
    return status


def drive(arguments: argparse.Namespace) -> int:
    """What rank 0 does."""
    if len(rpc.get_worker_infos()) < 2:
        print("needs two or more ranks: mpirun -n 3 python examples/checkpoint_resume.py", file=sys.stderr)
        return 2
    try:
        load_images()
    except ImportError:
        print("needs scikit-learn for its images: pip install mpirpc[demo]", file=sys.stderr)
        return 1
    if arguments.checkpoint is not None:
        train(arguments.checkpoint, arguments.resume, arguments.stop_at)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return show(Path(folder) / "checkpoint.pt")


if __name__ == "__main__":
    rpc.run_main(lambda: sys.exit(main()))
