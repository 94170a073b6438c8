"""Every rank gives a few bytes to every other rank: an allgather that sleeps while it waits.

Only upper-case (buffer) calls: mpi4py's pickling collectives may hold the interpreter lock inside MPI and
then stand in the way of another thread's progress. And no blocking call: waiting inside MPI burns a core.
"""

from __future__ import annotations

import time

from mpi4py import MPI

TAG = 77
SHORTEST_PAUSE = 0.0001
LONGEST_PAUSE = 0.005


class Exchange:
    """An allgather on a communicator of its own.

    Making one is collective over ``MPI.COMM_WORLD``.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.missing: list[int] = []
        """Ranks that the exchange going on has not heard from; read by the watchdog's thread."""

    def allgather(self, mine: bytes) -> list[bytes]:
        """Return what each rank gave, in the order of ranks. Waits for all, without limit."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._comm.Isend([mine, MPI.BYTE], dest=rank, tag=TAG) for rank in others]
        got = {self.rank: mine}
        self.missing = others
        pause = SHORTEST_PAUSE
        while True:
            got.update(self._receive_waiting(self.missing))
            self.missing = [rank for rank in others if rank not in got]
            if not self.missing and MPI.Request.Testall(sends):
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return [got[rank] for rank in range(self.size)]

    def _receive_waiting(self, sources: list[int]) -> dict[int, bytes]:
        received = {}
        for source in sources:
            status = MPI.Status()
            message = self._comm.Improbe(source=source, tag=TAG, status=status)
            if message is not None:
                buffer = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([buffer, MPI.BYTE])
                received[source] = bytes(buffer)
        return received
