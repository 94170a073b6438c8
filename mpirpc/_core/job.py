"""``Job``: all ranks that were started together, before, beside and after RPC.

It has a communicator of its own, so nothing here meets the messages of RPC or of the program. Waiting is
done by looking and sleeping, so that signals are heard.

The ranks of a host share a *board*, a piece of memory in which a rank that fails says so. Reading and
writing it needs no MPI: it works while MPI is stuck, at any thread level, and in signal handlers.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpirpc._core.mpi_faults import end_job, is_loss
from mpirpc._core.timing import monotonic
from mpirpc.errors import ConfigurationError

SHORT_LOOK = 1e-3
LONG_LOOK = 0.05
"""Seconds between two looks at an agreement, at first and later."""

_SLOT = struct.Struct("=q")


class Board:
    """Who of this host's ranks has failed, and when.

    Args:
        slots: One signed 64-bit number for each rank of the host, zero at first.
        place: This rank's.
    """

    def __init__(self, slots: mmap.mmap, place: int) -> None:
        self._slots = slots
        self._place = place

    def post_failure(self) -> None:
        """Say that this rank has failed, now."""
        if not self._read()[self._place]:
            _SLOT.pack_into(self._slots, self._place * _SLOT.size, time.time_ns())

    def has_failure(self) -> bool:
        """Say whether a rank of this host has failed."""
        return any(self._read())

    def is_first(self) -> bool:
        """Say whether no rank of this host has failed before this one."""
        failed = [(when, place) for place, when in enumerate(self._read()) if when]
        return bool(failed) and min(failed)[1] == self._place

    def _read(self) -> list[int]:
        return [when for (when,) in _SLOT.iter_unpack(self._slots[:])]


class Job:
    """The ranks that were started together. Collective: every rank makes one.

    Attributes:
        rank: In MPI's world.
        size: Of MPI's world.
        local_rank: Among the ranks of this host.
        local_size: How many ranks this host has.
        host_index: Which host this is, counted by first ranks.
        num_hosts: How many hosts there are.
        host: Its name.
        is_threaded: Whether it may call MPI while RPC runs (MPI_THREAD_MULTIPLE).
        board: Who has failed on this host.
    """

    def __init__(self) -> None:
        if not MPI.Is_initialized():
            raise ConfigurationError("MPI is not initialized", "remove mpi4py.rc.initialize settings")
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self.host = MPI.Get_processor_name()
        self.is_threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        local = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.local_rank, self.local_size = local.rank, local.size
        leaders = np.zeros(self.size, dtype=np.int32)
        self._comm.Allgather(np.array([local.rank == 0], dtype=np.int32), leaders)
        mine = np.array([self.rank], dtype=np.int32)
        local.Bcast(mine, 0)
        self.host_index = int(leaders[: mine[0]].sum())
        self.num_hosts = int(leaders.sum())
        self.board = _make_board(local)
        local.Free()
        self._alone: int | None = None  # set if a rank has died before all had agreed
        self._agreement: tuple[MPI.Request, np.ndarray, np.ndarray] | None = None

    def share(self, text: str) -> str:
        """Return what rank 0 gives. Collective; blocks."""
        data = bytearray(text.encode())
        nbytes = np.array([len(data)], dtype=np.int32)
        self._comm.Bcast(nbytes, 0)
        if self.rank:
            data = bytearray(int(nbytes[0]))
        self._comm.Bcast([data, MPI.BYTE], 0)
        return data.decode()

    def post_agreement(self, value: int) -> None:
        """Take part in the agreement on the largest ``value``; once only, later values do not count."""
        if self._agreement is None and self._alone is None:
            mine, largest = np.array([value], dtype=np.int32), np.zeros(1, dtype=np.int32)
            try:
                self._agreement = (self._comm.Iallreduce(mine, largest, MPI.MAX), mine, largest)
            except MPI.Exception as error:
                self._end_alone(error, value)

    def poll_agreement(self) -> int | None:
        """Return what was agreed on, once every rank has taken part."""
        if self._alone is not None:
            return self._alone
        try:
            if self._agreement is None or not self._agreement[0].Test():
                return None
        except MPI.Exception as error:
            self._end_alone(error, int(self._agreement[1][0]) if self._agreement else 0)
            return self._alone
        return int(self._agreement[2][0])

    def _end_alone(self, error: MPI.Exception, value: int) -> None:
        """A rank has died, and no agreement is possible any more: this rank goes by its own value."""
        if not is_loss(error):
            raise error
        self._alone = value

    def wait_agreement(self, deadline: float) -> int | None:
        """Wait until every rank has taken part; None if some have not by ``deadline``."""
        pause = SHORT_LOOK
        while (found := self.poll_agreement()) is None and monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LONG_LOOK)
        return found

    def abort(self, status: int) -> None:
        """End every rank at once (MPI_Abort); the launcher ends with ``status``, or another that is not 0.

        Where the others survive it (``mpi_faults.py``), end this rank alone.
        """
        end_job(status)

    def __repr__(self) -> str:
        return f"Job(rank {self.rank} of {self.size}, host {self.host})"


def _make_board(local: MPI.Comm) -> Board:
    """Make the board of a host: a file without a name, in memory. Collective."""
    nbytes = _SLOT.size * local.size
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    name = bytearray(os.fsencode(folder / f"mpirpc-{uuid.uuid4().hex}").ljust(1024, b"\0"))
    local.Bcast([name, MPI.BYTE], 0)
    path = Path(os.fsdecode(bytes(name).rstrip(b"\0")))
    if local.rank == 0:
        path.write_bytes(bytes(nbytes))
    local.Barrier()
    try:
        with path.open("r+b") as file:
            slots = mmap.mmap(file.fileno(), nbytes)
    except OSError:  # ranks in containers of their own: each has a board for itself
        slots = mmap.mmap(-1, nbytes)
    local.Barrier()
    if local.rank == 0:
        path.unlink()
    return Board(slots, local.rank)


_job: Job | None = None


def get_job() -> Job:
    """Return this process's job. Collective at the first call."""
    global _job
    if _job is None:
        _job = Job()
    return _job
