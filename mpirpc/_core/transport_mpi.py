"""Messages over MPI.

The head of a message is one MPI message on a communicator of its own, received as ``posted_heads.py`` says
(on one host by receives posted ahead, else by matched probes); its frames follow on a second communicator, in
order, straight into their final memory. A long head is announced on the first one by its length and follows
as the first frame. MPI keeps the order of messages per pair and communicator, so the n-th receive posted
there meets the n-th frame sent (MPI-4.1 section 3.5): no tag is needed to tell them apart, and call ids stay
out of tags (some networks offer 20 bits only).

MPI libraries before MPI-4 refuse messages of more than 2**31 - 1 bytes: frames are cut into chunks.

Where ranks may die and leave the others alive (``mpi_faults.py``), what was under way with a dead one is put
aside and its messages are dropped.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from mpi4py import MPI

from mpirpc._core.current import stop_all
from mpirpc._core.doorbell import STAYS_AWAKE, Doorbell
from mpirpc._core.mpi_faults import Losses, call_at_finalize, can_survive, end_job, flush, is_loss
from mpirpc._core.mpi_group import hang_bell
from mpirpc._core.posted_heads import POSTED_NBYTES, PostedHeads, ProbedHeads
from mpirpc._core.timing import monotonic
from mpirpc._core.transport import Arrival, Outgoing, TransportStats
from mpirpc._core.wire import copy_of, has_frames, is_about_rest, new_frames
from mpirpc.errors import TransportError, WorkerLostError

TAG = 0
ANNOUNCEMENT = struct.Struct("<Q")
"""Sent in place of a long head: its length. No head is as short as this."""

ARRIVALS_PER_POLL = 8

_abandoned: list[object] = []
"""What groups that ended without agreement left: freeing communicators is collective, so all is kept."""


@dataclass(slots=True)
class _Incoming:
    """A message of which not everything has come yet.

    ``long_head`` is set until a head that was announced is complete; ``requests`` are the receives posted for
    it, then, in ``frames``, those of the frames. None if they are not posted yet.
    """

    head: bytearray
    long_head: int = 0
    frames: list[torch.Tensor] = field(default_factory=list)
    requests: deque[MPI.Request] | None = None


class MPITransport:
    """One worker's end of a group on an MPI communicator.

    Args:
        comm: Its ranks are the group. Duplicated here (collective).
        chunk_nbytes: Frames are cut into MPI messages of at most this size.
    """

    def __init__(self, comm: MPI.Comm, chunk_nbytes: int) -> None:
        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()
        self.survives_losses = can_survive(os.environ)
        self.on_lost: Callable[[int], None] = lambda rank: None
        self._heads = comm.Dup()
        self._frames = comm.Dup()
        for made in (self._heads, self._frames):
            made.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises
        call_at_finalize(stop_all)
        self._losses: Losses | None = None
        if self.survives_losses:
            self._losses = Losses(self._heads, [self._frames])
            self._losses.greet()
        self.bell: Doorbell | None = hang_bell(self._heads)
        on_one_host = self.bell is not None
        self._head_receives = (PostedHeads if on_one_host else ProbedHeads)(self._heads, TAG)
        self._take_head = self._head_receives.take
        self._chunk_nbytes = chunk_nbytes
        self._to_myself: deque[Arrival] = deque()
        # by dest: (handle, what it sends from, nbytes), oldest first; post_send adds, poll removes
        self._unfinished: dict[int, deque[tuple[MPI.Request, object, int]]] = {}
        self._unfinished_nbytes: dict[int, int] = {}
        self._incoming: dict[int, deque[_Incoming]] = {}  # by source, in the order of their heads
        self._sum: tuple[MPI.Request, np.ndarray, np.ndarray] | None = None
        self._sent = self._received = self._sent_nbytes = self._received_nbytes = 0

    # --- sending ---

    def post_send(self, dest: int, message: Outgoing) -> None:
        """Start sending. Copies: none, except to oneself.

        Raises:
            WorkerLostError: ``dest`` is dead.
            TransportError: MPI refused the message.
        """
        if self._losses is not None and dest in self._losses.ranks:
            raise WorkerLostError(f"rank {dest} has died")
        if self.bell is not None:
            self.bell.rouse(dest)  # first: the worker wakes up while the message leaves
        head = message.head
        nbytes = len(head)
        if dest == self.rank:
            frames = [copy_of(frame) for frame in message.frames]
            self._to_myself.append(Arrival(dest, bytearray(head), frames))
        else:
            try:
                if nbytes <= POSTED_NBYTES:
                    self._post(dest, self._heads, head, head, nbytes)
                else:
                    announcement = ANNOUNCEMENT.pack(nbytes)
                    self._post(dest, self._heads, announcement, announcement, ANNOUNCEMENT.size)
                    self._post_frame(dest, MPI.buffer(head).address, nbytes, head)
                for frame in message.frames:
                    self._post_frame(dest, frame.data_ptr(), frame.nbytes, frame)
            except MPI.Exception as error:
                if self._losses is not None and is_loss(error):
                    self._lose()
                    raise WorkerLostError(f"rank {dest} has died") from error
                raise _translate(error, f"sending {message.nbytes} bytes to rank {dest}") from error
        # last: a shutdown waits until all that counts as sent has been received
        self._sent += 1
        self._sent_nbytes += message.nbytes if message.frames else nbytes
        if self._losses is not None and not is_about_rest(head):
            self._losses.sent_to[dest] += 1

    def _post(self, dest: int, comm: MPI.Comm, buffer: object, keep: object, nbytes: int) -> None:
        request = comm.Isend([buffer, nbytes, MPI.BYTE], dest, TAG)
        if request.Test():
            return
        self._unfinished.setdefault(dest, deque()).append((request, keep, nbytes))
        self._unfinished_nbytes[dest] = self._unfinished_nbytes.get(dest, 0) + nbytes

    def _post_frame(self, dest: int, address: int, nbytes: int, keep: object) -> None:
        for at, size in self._chunks(nbytes):
            self._post(dest, self._frames, MPI.buffer.fromaddress(address + at, size), keep, size)

    def _chunks(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut ``nbytes`` into (offset, size) pieces that one MPI message can carry."""
        step = self._chunk_nbytes
        return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

    def _finish_sends(self) -> None:
        for dest in list(self._unfinished):
            queue = self._unfinished[dest]
            while queue and queue[0][0].Test():
                self._unfinished_nbytes[dest] -= queue.popleft()[2]
            if not queue:
                del self._unfinished[dest]

    def has_unfinished(self) -> bool:
        """Say whether a send or a receive is under way."""
        return bool(self._unfinished or self._incoming)

    def unfinished_nbytes(self, dest: int) -> int:
        """Return how many bytes to ``dest`` have not left yet."""
        return self._unfinished_nbytes.get(dest, 0)

    # --- receiving ---

    def poll(self) -> Sequence[Arrival]:
        """Move everything forward a step; return a few complete messages.

        Raises:
            TransportError: MPI reports a failure.
        """
        arrivals: list[Arrival] = []
        try:
            if self._unfinished:
                self._finish_sends()
            if self._to_myself:
                arrivals.append(self._to_myself.popleft())
            head = self._take_head()
            if head is not None:
                self._sort(head, arrivals)
            if self._incoming:
                self._receive(arrivals)
        except MPI.Exception as error:
            if self._losses is None or not is_loss(error):
                raise _translate(error, "receiving") from error
            self._lose()
        if self._losses is not None:
            self._tell_losses()
            arrivals = [arrival for arrival in arrivals if arrival.source not in self._losses.ranks]
            for arrival in arrivals:
                if not is_about_rest(arrival.head):
                    self._losses.received_from[arrival.source] += 1
        if arrivals:
            awake_until = monotonic() + STAYS_AWAKE
            for arrival in arrivals:
                self._received += 1
                self._received_nbytes += arrival.nbytes if arrival.frames else len(arrival.head)
                if self.bell is not None:
                    self.bell.awake_until[arrival.source] = awake_until
        return arrivals

    def _sort(self, taken: tuple[int, bytearray] | None, arrivals: list[Arrival]) -> None:
        """Put a head, and more that have come, where they belong: whole messages go to ``arrivals``."""
        num_taken = 1
        while taken is not None:
            source, head = taken
            if len(head) == ANNOUNCEMENT.size:
                self._later(source, _Incoming(bytearray(), *ANNOUNCEMENT.unpack(head)))
            elif source in self._incoming or has_frames(head):
                self._later(source, _Incoming(head))
            else:
                arrivals.append(Arrival(source, head, []))
            taken = self._take_head() if num_taken < ARRIVALS_PER_POLL else None
            num_taken += 1

    def _later(self, source: int, incoming: _Incoming) -> None:
        self._incoming.setdefault(source, deque()).append(incoming)

    def _receive(self, arrivals: list[Arrival]) -> None:
        """Move incomplete messages forward.

        Heads of one source are taken strictly in order, because the order of their frames' receives must be
        that of the sends.
        """
        for source in list(self._incoming):
            left: deque[_Incoming] = deque()
            queue = self._incoming[source]
            while queue:
                incoming = queue.popleft()
                if incoming.long_head and not self._receive_head(source, incoming):
                    queue.appendleft(incoming)
                    break
                if self._receive_frames(source, incoming):
                    arrivals.append(Arrival(source, incoming.head, incoming.frames))
                else:
                    left.append(incoming)
            left.extend(queue)
            if left:
                self._incoming[source] = left
            else:
                del self._incoming[source]

    def _receive_head(self, source: int, incoming: _Incoming) -> bool:
        """Post the receives of an announced head, or look after them; say whether it is here."""
        if incoming.requests is None:
            incoming.head = bytearray(incoming.long_head)
            address = MPI.buffer(incoming.head).address
            incoming.requests = self._receives(source, address, incoming.long_head)
        if not _are_done(incoming.requests):
            return False
        incoming.long_head, incoming.requests = 0, None
        return True

    def _receive_frames(self, source: int, incoming: _Incoming) -> bool:
        """Post the receives of a message's frames, or look after them; say whether all are here."""
        if incoming.requests is None:
            incoming.requests = deque()
            for frame in new_frames(incoming.head):
                incoming.frames.append(frame)
                incoming.requests += self._receives(source, frame.data_ptr(), frame.nbytes)
        return _are_done(incoming.requests)

    def _receives(self, source: int, address: int, nbytes: int) -> deque[MPI.Request]:
        """Post the receives of one frame."""
        return deque(
            self._frames.Irecv([MPI.buffer.fromaddress(address + at, size), size, MPI.BYTE], source, TAG)
            for at, size in self._chunks(nbytes)
        )

    # --- losing workers ---

    def _lose(self) -> None:
        """Find out who died, and put aside what was under way with them: MPI may still touch the buffers."""
        assert self._losses is not None
        self._losses.look()
        for rank in self._losses.untold:
            _abandoned.append((self._unfinished.pop(rank, None), self._incoming.pop(rank, None)))
            self._unfinished_nbytes.pop(rank, None)

    def _tell_losses(self) -> None:
        assert self._losses is not None
        while self._losses.untold:
            self.on_lost(self._losses.untold.pop(0))

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many messages went to ``rank`` and came from it, without those of coming to rest."""
        if self._losses is None:
            return 0, 0
        return self._losses.sent_to[rank], self._losses.received_from[rank]

    # --- agreeing ---

    def post_sum(self, values: Sequence[int]) -> None:
        """Start adding up ``values`` over all workers."""
        mine = np.array(values, dtype=np.int64)
        total = np.zeros_like(mine)
        self._sum = (self._heads.Iallreduce(mine, total, MPI.SUM), mine, total)
        if self.bell is not None:  # the last to take part wakes those whose part is not over
            self.bell.ring_all()

    def poll_sum(self) -> list[int] | None:
        """Return the sums once every worker has taken part, else None."""
        if self._sum is None or not self._sum[0].Test():
            return None
        total = self._sum[2]
        self._sum = None
        return [int(value) for value in total]

    # --- the end ---

    def stats(self) -> TransportStats:
        """Return the counts so far."""
        return TransportStats(
            self._sent,
            self._sent_nbytes,
            self._received,
            self._received_nbytes,
            sum(map(len, self._unfinished.values())),
            sum(self._unfinished_nbytes.values()),
        )

    def close(self, graceful: bool) -> None:
        """Free the communicators (graceful: collective, with nothing under way), or put them aside.

        Where workers may die they are always put aside: freeing is collective.
        """
        if self.bell is not None:
            self.bell.close()
        if self._losses is not None and graceful:
            flush([request for queue in self._unfinished.values() for request, _, _ in queue])
            graceful = False
        if graceful:
            for queue in self._unfinished.values():
                MPI.Request.Waitall([request for request, _, _ in queue])
            self._unfinished.clear()
            self._head_receives.close()
            self._heads.Free()
            self._frames.Free()
        else:
            # MPI may still read and write these buffers
            with contextlib.suppress(MPI.Exception):
                self._head_receives.withdraw()
            parts = (
                self._heads,
                self._frames,
                self._head_receives,
                self._unfinished,
                self._incoming,
                self._sum,
            )
            _abandoned.append(parts)

    def abort(self) -> None:
        """End every rank of the job at once (MPI_Abort); where the others survive it, this one alone."""
        end_job(1)


def _are_done(requests: deque[MPI.Request]) -> bool:
    """Drop the requests that are done, oldest first; say whether none is left."""
    while requests and requests[0].Test():
        requests.popleft()
    return not requests


def _translate(error: MPI.Exception, doing: str) -> TransportError:
    return TransportError(
        f"MPI failed while {doing}: {error.Get_error_string()} (class {error.Get_error_class()})"
    )
