"""How the ranks of a communicator become a group: what they tell each other before the first message.

Collective operations that look and sleep instead of blocking, so that Ctrl-C is heard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable

import numpy as np
from mpi4py import MPI

from mpirpc._core.current import is_forked
from mpirpc._core.doorbell import Doorbell
from mpirpc._core.launcher import find_wrong_belief, find_wrong_start, library_name
from mpirpc._core.timing import UNLIMITED, deadline_after, monotonic
from mpirpc._core.transport import check_name
from mpirpc.errors import ConfigurationError

JOIN_NOTICE = 60.0
"""Seconds in ``init_rpc`` after which a rank says that it waits for others."""

log = logging.getLogger("mpirpc.transport")

_abandoned: list[object] = []
"""Collectives that were broken off: MPI may still use their buffers."""


def join_group(
    comm: MPI.Comm | None,
    name: str | None,
    rank: int,
    world_size: int | None,
    problem: str = "",
    mapped: Iterable[str] = (),
) -> tuple[MPI.Comm, list[str]]:
    """Meet the other workers: one collective on ``comm``. Blocks until every rank has called it.

    Args:
        comm: Its ranks are the group; None means all ranks of the job.
        name: This worker's name; None means ``worker{rank}``.
        rank: What the program believes its rank to be; -1 if it has no opinion.
        world_size: Likewise; None if it has no opinion.
        problem: What the caller found wrong with this rank, to be raised on all.
        mapped: Names of workers for which this one has device maps.

    Returns:
        The communicator, and all workers' names in rank order.

    Raises:
        ConfigurationError: On every rank alike: MPI has too low a thread level, a rank was started wrongly or
            holds wrong beliefs, a name is not allowed, two workers have the same, or a device map is for no
            worker. On this rank alone: MPI cannot be used in this process.
    """
    _check_mpi_runs()
    comm = MPI.COMM_WORLD if comm is None else comm
    name = f"worker{comm.rank}" if name is None else name
    problem = problem or _find_problem(comm, name, rank, world_size)
    mine = json.dumps([str(name), problem, list(map(str, mapped))]).encode()
    everyone = [json.loads(text) for text in _allgather(comm, mine)]
    names = [entry[0] for entry in everyone]
    problems = [f"rank {place}: {entry[1]}" for place, entry in enumerate(everyone) if entry[1]]
    problems += [
        f"rank {place}: device_maps names {worker!r}, which is no worker of the group"
        for place, entry in enumerate(everyone)
        for worker in entry[2]
        if worker not in names
    ]
    problems += [
        f"the name {worker!r} is used by ranks {[i for i, found in enumerate(names) if found == worker]}"
        for worker in sorted(set(names))
        if names.count(worker) > 1
    ]
    if problems:
        raise ConfigurationError(
            "the RPC group could not be formed: " + "; ".join(problems), "this error is raised on every rank"
        )
    return comm, names


def hang_bell(comm: MPI.Comm) -> Doorbell | None:
    """Give each worker a bell, if all can ring all: none if they are on several hosts. Collective."""
    bell = None
    with contextlib.suppress(OSError):
        bell = Doorbell()
    addresses = _allgather(comm, (bell.address if bell is not None else "").encode())
    finds_all = bell is not None and all(addresses) and bell.find([address.decode() for address in addresses])
    if all(_allgather(comm, b"y" if finds_all else b"")):
        return bell
    if bell is not None:
        bell.close()
    return None


def _check_mpi_runs() -> None:
    """Refuse where no collective could tell the others."""
    if is_forked():
        raise ConfigurationError(
            "this process was forked from an MPI rank: MPI cannot be used in it",
            "start all ranks with mpirun, and none with multiprocessing",
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "has been finalized" if MPI.Is_initialized() else "is not initialized"
        raise ConfigurationError(
            f"MPI {state}", "remove mpi4py.rc.initialize settings and calls of MPI.Finalize"
        )


def _find_problem(comm: MPI.Comm, name: object, rank: int, world_size: int | None) -> str:
    """Say what is wrong with this rank; nothing if all is well."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return (
            f"MPI was started with thread level {MPI.Query_thread()}, mpirpc needs MPI_THREAD_SERIALIZED "
            f"({MPI.THREAD_SERIALIZED}) at least: remove mpi4py.rc.thread_level settings"
        )
    if problem := check_name(name):
        return problem
    world = MPI.COMM_WORLD
    library = library_name(MPI.Get_library_version())
    if problem := find_wrong_start(os.environ, world.rank, world.size, library):
        return problem
    if rank not in (-1, comm.rank):
        return find_wrong_belief(os.environ, "rank", rank, comm.size, comm.rank)
    if world_size not in (None, comm.size):
        return find_wrong_belief(os.environ, "world_size", world_size, comm.size, comm.size)
    return ""


def _allgather(comm: MPI.Comm, mine: bytes) -> list[bytes]:
    """Tell every rank of ``comm`` a few bytes and hear theirs, in rank order."""
    counts = np.zeros(comm.size, dtype=np.int32)
    length = np.array([len(mine)], dtype=np.int32)
    _wait_for_all(comm.Iallgather(length, counts), (length, counts))
    everything = bytearray(int(counts.sum()))
    _wait_for_all(comm.Iallgatherv([mine, MPI.BYTE], [everything, counts, MPI.BYTE]), (mine, everything))
    ends = np.cumsum(counts)
    return [
        bytes(everything[int(end) - int(count) : int(end)]) for count, end in zip(counts, ends, strict=True)
    ]


def _wait_for_all(request: MPI.Request, buffers: object) -> None:
    """Wait for a collective by looking and sleeping, so that Ctrl-C is heard."""
    pause, notice = 1e-5, deadline_after(JOIN_NOTICE)
    try:
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            if monotonic() >= notice:
                notice = UNLIMITED
                log.warning("init_rpc has waited %g s: some rank has not called it", JOIN_NOTICE)
    except BaseException:
        _abandoned.append((request, buffers))
        raise
