"""Pipeline parallelism: a network in stages, one per rank, with several micro-batches under way at a time.

    mpirun -n 4 python examples/pipeline.py

Rank 0 cuts each batch into micro-batches and hands them all to the first stage. A stage runs its layers and
hands the result straight to the next stage, without waiting for it: its method is marked with
``async_execution`` and returns the future of the next stage's call. The last stage computes the loss, which
comes back along the chain. While stage 2 works on one micro-batch, stage 1 works on the next.

The network is trained three times: in one process, through the stages with whole batches, and through the
stages with micro-batches. All losses must be equal. Prints the time of a step of each, as measured: stages
only help if each has a core of its own and work enough to outweigh the messages, so on a small or busy
machine they are slower. Times are printed, never judged. Last line, from rank 0:
``OK: the losses through the pipeline are those of one process``.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim
from torch.futures import Future
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.functions import async_execution
from mpirpc.optim import DistributedOptimizer

NUM_LAYERS = 6
WIDTH = 256
BATCH_SIZE = 256
NUM_MICRO_BATCHES = 8
NUM_STEPS = 6
LEARNING_RATE = 0.1
TOLERANCE = 1e-9


def make_layer(number: int) -> nn.Module:
    """One layer of the network; its start values depend on its number alone."""
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(number)
    nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.Tanh())


def make_data() -> tuple[Tensor, Tensor]:
    """Random points, and the sines of their features as targets: ``(BATCH_SIZE, WIDTH)`` both."""
    inputs = torch.randn(BATCH_SIZE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    return inputs, torch.sin(inputs)


def sum_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of some points in the mean loss over the whole batch; shares add up."""
    return functional.mse_loss(outputs, targets, reduction="sum") / BATCH_SIZE


class Stage:
    """Some layers of the network, and the way to the next stage.

    Args:
        layers: Their numbers.
        next_stage: None for the last one, which computes the loss.
    """

    def __init__(self, layers: list[int], next_stage: rpc.RRef[Stage] | None) -> None:
        self.layers = nn.Sequential(*[make_layer(number) for number in layers])
        self.next_stage = next_stage
        self.mutex = threading.Lock()  # one micro-batch at a time: a stage stands for one device

    @async_execution
    def forward(self, inputs: Tensor, targets: Tensor) -> Future[Tensor]:
        """Run this stage and all that follow; the answer is the loss."""
        with self.mutex:
            outputs = self.layers(inputs)
        if self.next_stage is not None:
            return self.next_stage.rpc_async().forward(outputs, targets)
        loss: Future[Tensor] = Future()
        loss.set_result(sum_of_squares(outputs, targets))
        return loss

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Give out references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


def make_stages() -> list[rpc.RRef[Stage]]:
    """Share out the layers among the other ranks, the last stage first: each is told the next."""
    workers = rpc.get_worker_infos()[1 : NUM_LAYERS + 1]
    shares = torch.arange(NUM_LAYERS).tensor_split(len(workers))
    stages: list[rpc.RRef[Stage]] = []
    for worker, share in reversed(list(zip(workers, shares, strict=True))):
        stages.insert(0, rpc.remote(worker, Stage, args=(share.tolist(), stages[0] if stages else None)))
    return stages


def train_in_stages(num_micro_batches: int) -> tuple[list[float], float]:
    """Train through the pipeline; returns the losses and the median time of a step in seconds."""
    stages = make_stages()
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=LEARNING_RATE)
    inputs, targets = make_data()
    micro_batches = list(zip(inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True))

    def step() -> float:
        with autograd.context() as context_id:
            futures = [stages[0].rpc_async().forward(*micro_batch) for micro_batch in micro_batches]
            loss = torch.stack([future.wait() for future in futures]).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.item()

    return run_steps(step)


def train_alone() -> tuple[list[float], float]:
    """The same training in this process."""
    model = nn.Sequential(*[make_layer(number) for number in range(NUM_LAYERS)])
    optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = make_data()

    def step() -> float:
        optimizer.zero_grad()
        loss = sum_of_squares(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run_steps(step)


def run_steps(step: Callable[[], float]) -> tuple[list[float], float]:
    """Make all steps; returns their losses and the median of their times."""
    losses, times = [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    return losses, statistics.median(times)


def drive(num_stages: int) -> int:
    """What rank 0 does. Returns an exit status."""
    alone, time_alone = train_alone()
    whole, time_whole = train_in_stages(num_micro_batches=1)
    micro, time_micro = train_in_stages(NUM_MICRO_BATCHES)
    print(f"loss {alone[0]:.4f} at first, {alone[-1]:.4f} after {NUM_STEPS} steps")
    print(f"time of a step, median, on {len(os.sched_getaffinity(0))} cores:")
    print(f"  one process                       {1e3 * time_alone:7.1f} ms")
    print(f"  {num_stages} stages, whole batch              {1e3 * time_whole:7.1f} ms")
    print(f"  {num_stages} stages, {NUM_MICRO_BATCHES} micro-batches          {1e3 * time_micro:7.1f} ms")
    print(
        f"speed-up by micro-batches: {time_whole / time_micro:.2f} times the whole batch, "
        f"{time_alone / time_micro:.2f} times one process"
    )
    difference = max(abs(a - b) for losses in (whole, micro) for a, b in zip(alone, losses, strict=True))
    if not (difference < TOLERANCE and alone[-1] < alone[0]):
        print(f"FAILED: losses differ by {difference}; {TOLERANCE} is allowed, and they go down", flush=True)
        return 1
    print("OK: the losses through the pipeline are those of one process", flush=True)
    return 0


def main() -> int:
    torch.set_num_threads(1)  # each stage has one core, and so has the one process
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        num_stages = min(len(rpc.get_worker_infos()) - 1, NUM_LAYERS)  # further ranks have nothing to do
        status = drive(num_stages) if num_stages >= 2 else refuse()
    rpc.shutdown()  # the other ranks serve until here
    return status


def refuse() -> int:
    print("needs three or more ranks: mpirun -n 4 python examples/pipeline.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
