"""The fixture ``rpc_world``: an RPC group of all ranks around one test.

All ranks run the test's body; a rank that has nothing to do returns at once, and serves calls until the
others are done. Afterwards, on all ranks alike: the leak check, ``shutdown``, and a look at the threads left.
When the test failed on any rank, the group is closed without waiting for anything (``graceful=False``) and
nothing is checked, since the test's own error is the story.

Functions that a test sends must be at module level.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from mpi4py import MPI

import mpirpc
from mpirpc.errors import NotInitializedError
from tests._ranks.in_step import PASSED_EVERYWHERE

MUST_BE_ZERO = (
    "pending_calls",
    "open_calls",
    "running_calls",
    "unfinished_nbytes",
    "owned_rrefs",
    "used_rrefs",
    "forks",
    "pending_rrefs",
    "autograd_contexts",
)
"""Entries of ``mpirpc.debug_info()`` that count things a test must not leave behind."""

SETTLE = 3.0
"""Seconds that the last delete messages of a test may take."""

LOOKS_BEFORE = 10
"""Looks at what is left before garbage is collected: under pytest that costs some tenths of a second."""


@dataclass(frozen=True)
class RpcWorld:
    """The group as one rank sees it."""

    comm: MPI.Intracomm
    """A communicator for the test's own messages; the library does not use it."""
    rank: int
    size: int
    names: list[str]

    @property
    def name(self) -> str:
        """This worker's name."""
        return self.names[self.rank]

    @property
    def next(self) -> str:
        """Name of the worker after this one."""
        return self.names[(self.rank + 1) % self.size]

    def barrier(self) -> None:
        """Wait for all ranks without burning a core; calls are served meanwhile."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.0005)


@pytest.fixture
def rpc_world(request: pytest.FixtureRequest) -> Iterator[RpcWorld]:
    """Open an RPC group of all ranks; ``@pytest.mark.rpc_options(...)`` sets its backend options."""
    comm = MPI.COMM_WORLD.Dup()
    threads_before = set(threading.enumerate())
    world = RpcWorld(comm, comm.rank, comm.size, [f"worker{rank}" for rank in range(comm.size)])
    _open(world, request)
    yield world
    if request.node.stash.get(PASSED_EVERYWHERE, True):
        request.node.funcargs.clear()  # pytest keeps the values of other fixtures until later
        leaks = _wait_until_empty(_leaks)
        _close(graceful=True)
        leaks += _wait_until_empty(lambda: _new_threads(threads_before))
        comm.Free()
        if leaks:
            pytest.fail(f"left behind on rank {world.rank}: {', '.join(leaks)}", pytrace=False)
    else:
        _close(graceful=False)


def _open(world: RpcWorld, request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("rpc_options")
    chosen: dict[str, Any] = dict(marker.kwargs) if marker else {}
    options = mpirpc.MPIRpcBackendOptions(comm=world.comm, **chosen)
    mpirpc.init_rpc(world.name, rpc_backend_options=options)


def _close(graceful: bool) -> None:
    with contextlib.suppress(NotInitializedError):  # the test has closed the group itself
        mpirpc.shutdown(graceful=graceful)


def _wait_until_empty(look: Callable[[], list[str]]) -> list[str]:
    """What is still there when it has had the time to go."""
    deadline = time.monotonic() + SETTLE
    looks = 0
    while (left := look()) and time.monotonic() < deadline:
        looks += 1
        if looks % 100 == LOOKS_BEFORE:  # for what is left in cycles
            gc.collect()
        time.sleep(0.002)
    return left


def _leaks() -> list[str]:
    debug_info = getattr(mpirpc, "debug_info", None)
    if debug_info is None:
        return []
    try:
        info = debug_info()
    except NotInitializedError:
        return []
    return [f"{name}={info[name]}" for name in MUST_BE_ZERO if info.get(name)]


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [f"thread {thread.name}" for thread in threading.enumerate() if thread not in before]
