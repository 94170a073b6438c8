"""A training that loses a rank and goes on with the others: checkpoint, loss, rebuild, resume, in one job.

    mpirun --with-ft ulfm -n 4 python examples/survive.py        # Open MPI 5

Rank 0 trains a small network whose two layers are RemoteModules on the first two ranks that are left. Every
few steps it keeps a checkpoint of model and optimizer. In the middle of the training the rank with the first
layer is killed (SIGKILL). The step that needs it raises ``WorkerLostError``; rank 0 builds the network anew
on the ranks that are left, loads the checkpoint, and does again what was done since.

Checks that all losses are those of a training that lost nobody. From rank 0, as the last line:
``OK: the losses after losing worker1 differ from those without by 0.0``. Without ``--with-ft ulfm`` the
launcher would end the job with the first rank that dies: then nobody is killed, and it says so.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import WorkerLostError
from mpirpc.nn import RemoteModule, full_parameters, full_state_dict, load_full_state_dict
from mpirpc.optim import DistributedOptimizer

NUM_STEPS = 20
CHECKPOINT_EVERY = 5
KILL_AT = 12
SURVIVES = os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")


def make_layer(seed: int, inputs: int, outputs: int) -> nn.Module:
    """A layer whose start values depend on the seed alone; runs where the layer is to live."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


class Network(nn.Module):
    """Two layers on two other workers."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__()
        self.first = RemoteModule(workers[0], make_layer, (1, 8, 16))
        self.second = RemoteModule(workers[1], make_layer, (2, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` through both, wherever they are."""
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Training:
    """What lives as long as its workers do: the network, its optimizer, the losses so far."""

    def __init__(self, workers: list[str], checkpoint: dict[str, Any] | None = None) -> None:
        self.model = Network(workers)
        self.optimizer = DistributedOptimizer(optim.Adam, full_parameters(self.model), lr=0.01)
        self.losses: list[float] = []
        if checkpoint is not None:
            load_full_state_dict(self.model, checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.losses = list(checkpoint["losses"])

    def step(self) -> None:
        """Train on the batch of this step."""
        generator = torch.Generator().manual_seed(len(self.losses))
        x = torch.randn(32, 8, generator=generator)
        with autograd.context() as context_id:
            loss = functional.mse_loss(self.model(x), x.sum(1, keepdim=True).sin())
            autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        self.losses.append(loss.item())

    def checkpoint(self) -> dict[str, Any]:
        """Gather the state; ``torch.save`` would put it into a file."""
        return {
            "model": full_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "losses": list(self.losses),
        }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def living() -> list[str]:
    """The workers beside rank 0 that have not died."""
    lost = rpc.debug_info()["lost_workers"]
    return [worker.name for worker in rpc.get_worker_infos()[1:] if worker.name not in lost]


def train(victim: str) -> list[float]:
    """Train to the end, whoever dies on the way; ``victim`` is made to."""
    training = Training(living())
    checkpoint = training.checkpoint()
    while len(training.losses) < NUM_STEPS:
        try:
            if victim and len(training.losses) == KILL_AT:
                rpc.rpc_async(victim, die)
                victim = ""
            training.step()
            if len(training.losses) % CHECKPOINT_EVERY == 0:
                checkpoint = training.checkpoint()
        except WorkerLostError as error:
            done = len(training.losses)
            print(f"step {done}: {error.message}", flush=True)
            training = Training(living(), checkpoint)
            print(f"  goes on from step {len(training.losses)} with {living()[:2]}", flush=True)
    return training.losses


def main() -> int:
    torch.set_num_threads(1)  # sums in one order
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        status = drive()
    rpc.shutdown()  # the other ranks serve until here
    return status


def drive() -> int:
    """What rank 0 does."""
    if len(rpc.get_worker_infos()) < 4:
        print("needs 4 ranks: mpirun --with-ft ulfm -n 4 python examples/survive.py", file=sys.stderr)
        return 2
    if not SURVIVES:
        print("this job does not survive the death of a rank: nobody is killed", flush=True)
    expected = train(victim="")
    losses = train(victim="worker1" if SURVIVES else "")
    difference = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    verdict = "OK" if difference == 0 else "FAILED"
    print(f"{verdict}: the losses after losing worker1 differ from those without by {difference}", flush=True)
    return 0 if difference == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
