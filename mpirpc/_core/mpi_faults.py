"""What the MPI transport needs to outlive the death of other ranks: MPI's fault tolerance chapter (ULFM).

Only Open MPI 5 under ``mpirun --with-ft ulfm`` has it. There, after a death, an operation with the dead rank
fails, and so does every probe for any source until the failure has been acknowledged; operations between the
living go on. Collective operations on the communicator are broken for good: none is used after the start.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI

from mpirpc._core.timing import deadline_after, monotonic

GREETING = 1
"""Tag of the messages that workers exchange at the start."""

FLUSH = 5.0
"""Longest time in seconds that the last messages may take to leave at the end."""

FINALIZE_LIMIT = 3.0
"""Longest time in seconds that ``MPI_Finalize`` may take after a death."""

_SETTING = "OMPI_MCA_mpi_ft_enable"


def can_survive(environ: Mapping[str, str]) -> bool:
    """Say whether this job was started so that the death of a rank leaves the others alive."""
    has_it = MPI.get_vendor()[0] == "Open MPI" and hasattr(MPI.Comm, "Ack_failed")
    return has_it and environ.get(_SETTING, "").lower() in ("1", "true", "t", "yes", "y")


def is_loss(error: MPI.Exception) -> bool:
    """Say whether an operation failed because a rank has died."""
    return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class Losses:
    """Who is dead, and how many messages went to and came from each rank.

    Args:
        heads: The communicator that is probed.
        others: Those that only transfers between two ranks use.
    """

    def __init__(self, heads: MPI.Comm, others: list[MPI.Comm]) -> None:
        self._heads = heads
        self._others = others
        self.ranks: set[int] = set()  # the dead; look() adds
        self.untold: list[int] = []  # those of them that the transport has not told of yet
        self.sent_to = [0] * heads.size
        self.received_from = [0] * heads.size

    def greet(self) -> None:
        """Exchange a message with every rank: collective, blocks.

        Open MPI asks for a rank's address when it first sends to it, and for one that died on another host
        that question is never answered.
        """
        comm, me = self._heads, self._heads.rank
        peers = [rank for rank in range(comm.size) if rank != me]
        byte = np.zeros(1, dtype=np.uint8)
        into = np.zeros(comm.size, dtype=np.uint8)
        requests = [comm.Irecv([into[rank : rank + 1], 1, MPI.BYTE], rank, GREETING) for rank in peers]
        requests += [comm.Isend([byte, 1, MPI.BYTE], rank, GREETING) for rank in peers]
        try:
            MPI.Request.Waitall(requests)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_IN_STATUS and not is_loss(error):
                raise
            self.look()

    def look(self) -> None:
        """Ask MPI who has died, and acknowledge it, so that probes for any source work again."""
        for comm in (self._heads, *self._others):
            comm.Ack_failed()
        failed = self._heads.Get_failed()
        group = self._heads.Get_group()
        found = MPI.Group.Translate_ranks(failed, list(range(failed.size)), group)
        failed.Free()
        group.Free()
        new = sorted(set(found) - self.ranks)
        self.ranks.update(new)
        self.untold += new
        if new:
            _last_step.prepare()


class _LastStep:
    """Calls ``MPI_Finalize`` at the end of a program that has outlived another rank, with a limit.

    In Open MPI 5.0 it waits for all ranks, often for the dead one too (nearly always with several hosts). A
    thread of its own may stay in it while the program ends, with the program's exit status; mpi4py calls it
    no second time.
    """

    def __init__(self) -> None:
        self._may_begin = threading.Event()
        self._lock = threading.Lock()  # around making the thread: several groups may notice a death
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Make the thread: Python makes none any more when the program ends. Thread: any."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpirpc-finalize", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._may_begin.wait()
        if not MPI.Is_finalized():
            ctypes.CDLL(MPI.__file__).MPI_Finalize()  # mpi4py's keeps the interpreter

    def take(self) -> None:
        """Finalize, if a rank has died. Thread: the main one, last of all at exit."""
        if self._thread is not None:
            self._may_begin.set()
            self._thread.join(FINALIZE_LIMIT)


_last_step = _LastStep()
atexit.register(_last_step.take)


def end_job(status: int) -> None:
    """End every rank of the job at once (MPI_Abort). Where the others survive a death, end this one alone.

    There MPI_Abort ends no other rank, and some do not even learn of it; a signal they all learn of.
    """
    if can_survive(os.environ):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Abort(status)


def has_others() -> bool:
    """Say whether MPI runs, and this job has other ranks."""
    return MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def call_at_finalize(callback: Callable[[], None]) -> None:
    """Have ``callback()`` called when the program calls ``MPI.Finalize``, while MPI still works; once only.

    Source: MPI-4.1 section 11.2.4 (attributes of MPI_COMM_SELF are deleted first).
    """
    global _finalize_key
    if _finalize_key is None:
        _finalize_key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: callback())
        MPI.COMM_SELF.Set_attr(_finalize_key, True)


_finalize_key: int | None = None


def flush(requests: list[MPI.Request]) -> None:
    """Wait until sends have left, those that fail excepted; :data:`FLUSH` seconds at most."""
    deadline = deadline_after(FLUSH)
    while requests and monotonic() < deadline:
        requests = [request for request in requests if not _is_over(request)]


def _is_over(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
