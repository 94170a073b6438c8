"""How heads are received: by receives that are posted before anything comes, or by matched probes.

With posted receives a look at the network is one ``MPI_Test``, where a matched probe, its receive and the
questions about its status are three calls and a message object. Receives of one communicator are matched in
the order in which they were posted (MPI-4.1 section 3.5), so looking at them in that order keeps the messages
of each sender in theirs.

Over a network MPICH 5.0 leaves some posted receives for any source unfinished though their message has come
(seen over TCP): groups on several hosts use matched probes.
"""

from __future__ import annotations

from mpi4py import MPI

POSTED_NBYTES = 40 * 1024
"""Longest head that is sent to a posted receive: any with small tensors up to the default eager limit."""

NUM_POSTED = 8
"""Receives posted at a time; MPI keeps what comes when none is left."""


class PostedHeads:
    """The posted receives of one worker.

    Args:
        comm: Only heads travel on it with this tag.
        tag: Theirs.

    Raises:
        MPI.Exception: In every method.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._buffers = [memoryview(bytearray(POSTED_NBYTES)) for _ in range(NUM_POSTED)]
        self._requests = [
            comm.Recv_init([buffer, POSTED_NBYTES, MPI.BYTE], MPI.ANY_SOURCE, tag) for buffer in self._buffers
        ]
        self._next = NUM_POSTED  # the receive that completes next; those before it are used up
        self._status = MPI.Status()

    def take(self) -> tuple[int, bytearray] | None:
        """Return the next head with its sender's rank, or None.   Copies: once, out of the buffer."""
        place = self._next
        if place == NUM_POSTED:
            for request in self._requests:  # not Startall, which may start them in any order
                request.Start()
            place = self._next = 0
        status = self._status
        try:
            if not self._requests[place].Test(status):
                return None
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_PROC_FAILED:  # its sender died on the way
                self._next = place + 1
            raise
        self._next = place + 1
        return status.Get_source(), bytearray(self._buffers[place][: status.Get_count(MPI.BYTE)])

    def withdraw(self) -> None:
        """Take back the receives that nothing has come for. MPI may still write where a message is coming."""
        for request in self._requests[self._next :]:
            request.Cancel()
            request.Test()
        self._next = NUM_POSTED

    def close(self) -> None:
        """Withdraw and free the receives. No message is on its way."""
        for request in self._requests[self._next :]:
            request.Cancel()
            request.Wait()
        for request in self._requests:
            request.Free()


class ProbedHeads:
    """The same by matched probes, for groups on several hosts. See :class:`PostedHeads`."""

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm = comm
        self._tag = tag
        self._status = MPI.Status()

    def take(self) -> tuple[int, bytearray] | None:
        """Return the next head with its sender's rank, or None."""
        status = self._status
        found = self._comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
        if found is None:
            return None
        source, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
        head = bytearray(nbytes)
        found.Recv([head, nbytes, MPI.BYTE])
        return source, head

    def withdraw(self) -> None:
        """Do nothing: nothing is posted."""

    def close(self) -> None:
        """Do nothing: nothing is posted."""
