"""The raw MPI side of ``bench``: ping-pong with mpi4py alone, the floor under every call; facts about MPI.

The only file of the command that imports mpi4py. Ping-pong runs between ranks 0 and 1 on a communicator of
its own, while mpirpc is idle; rank 1 plays its part inside a call, which needs ``MPI_THREAD_MULTIPLE``.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

import mpirpc as rpc
from mpirpc.cli import bench_work
from mpirpc.cli.bench_work import Series

LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}

LOOK = 5e-4
"""Seconds between two looks of a rank that waits without load."""

MESSAGE = {"noop": (1, 1), "echo": (0, 0), "one-way": (0, 1)}
"""For each measurement with a raw form: bytes there and bytes back, 0 for the size measured."""

_ping_pong_comm: list[MPI.Comm] = []


@dataclass(frozen=True, slots=True)
class World:
    """What MPI says of this job."""

    rank: int
    size: int
    library: str
    standard: str
    thread_level: str


def world() -> World:
    """Ask MPI."""
    vendor, numbers = MPI.get_vendor()
    return World(
        MPI.COMM_WORLD.rank,
        MPI.COMM_WORLD.size,
        f"{vendor} {'.'.join(map(str, numbers))}",
        ".".join(map(str, MPI.Get_version())),
        LEVELS[MPI.Query_thread()],
    )


def host() -> str:
    """Return this rank's node, to count the nodes."""
    return MPI.Get_processor_name()


@contextlib.contextmanager
def ending_job_on_error() -> Iterator[None]:
    """Without RPC, ranks that wait for a failed one would wait for ever: end the job, with the traceback."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def wait_for_all() -> None:
    """Wait for all ranks with little load, then start at the same time."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(LOOK)
    MPI.COMM_WORLD.Barrier()


# --- ping-pong ---


def make_ping_pong_comm() -> None:
    """Make the communicator; on all ranks, before RPC starts."""
    _ping_pong_comm.append(MPI.COMM_WORLD.Dup())


class RawMPI:
    """Ping-pong of ``bytes there, bytes back`` by blocking send and receive.

    Args:
        fresh: Both ends receive into memory that is allocated for each message, as an RPC has to; else into
            the same buffer every time.
    """

    def __init__(self, fresh: bool) -> None:
        self.name = "fresh" if fresh else "mpi4py"
        self._fresh = fresh

    def can(self, work: str) -> bool:
        """Messages only; fresh memory makes a difference to large ones only."""
        return work == "echo" if self._fresh else work in MESSAGE

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def measure(self, work: str, parameters: Mapping[str, Any], count: int, warm: int) -> Series:
        """Play rank 0's part here and have rank 1 play its own."""
        nbytes = parameters.get("nbytes", 0)
        there, back = (fixed or nbytes for fixed in MESSAGE[work])
        other = rpc.rpc_async(1, answer_ping_pong, args=(there, back, count + warm, self._fresh))
        samples = _play(there, back, count + warm, self._fresh)
        other.wait()
        return {"time": samples[warm:]}


def _play(there: int, back: int, count: int, fresh: bool) -> list[float]:
    comm, outgoing, new_buffer = _ping_pong_comm[0], _buffer(there), _buffers(back, fresh)
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        comm.Send(outgoing, 1)
        comm.Recv(new_buffer(), 1)
        samples.append(time.perf_counter() - start)
    return samples


def answer_ping_pong(there: int, back: int, count: int, fresh: bool) -> None:
    """Rank 1's part. An echo sends back the very buffer that came."""
    comm, reply, new_buffer = _ping_pong_comm[0], _buffer(back), _buffers(there, fresh)
    for _ in range(count):
        received = new_buffer()
        comm.Recv(received, 0)
        comm.Send(received if there == back else reply, 0)


def _buffer(nbytes: int) -> Any:
    return torch.ones(nbytes, dtype=torch.uint8).numpy()


def _buffers(nbytes: int, fresh: bool) -> Callable[[], Any]:
    if fresh:
        return lambda: torch.empty(nbytes, dtype=torch.uint8).numpy()
    buffer = _buffer(nbytes)
    return lambda: buffer


# --- mpi4py.futures ---


def measure_futures(count: int, burst: int) -> dict[str, list[float]]:
    """Time a no-op alone, and as one of ``burst``, with ``mpi4py.futures``; on all ranks, before RPC starts.

    Returns:
        By measurement, seconds a call; filled at rank 0 only.
    """
    samples: dict[str, list[float]] = {"noop": [], "burst": []}
    executor: Any  # None on the other ranks, which work until rank 0 leaves
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:
            return samples
        for _ in range(count):
            start = time.perf_counter()
            executor.submit(bench_work.noop).result()
            samples["noop"].append(time.perf_counter() - start)
        for _ in range(max(2, count // burst)):
            start = time.perf_counter()
            for future in [executor.submit(bench_work.noop) for _ in range(burst)]:
                future.result()
            samples["burst"].append((time.perf_counter() - start) / burst)
    return samples
