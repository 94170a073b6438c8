"""Messages over MPI.

The head of a message is one MPI message on a communicator of its own, found by matched probe; its frames
follow on a second communicator, in order, straight into their final memory. MPI keeps the order of messages
per pair and communicator, so the n-th receive posted there meets the n-th frame sent (MPI-4.1 section 3.5):
no tag is needed to tell them apart, and call ids stay out of tags (some networks offer 20 bits only).

MPI libraries before MPI-4 refuse messages of more than 2**31 - 1 bytes: frames are cut into chunks.

Where ranks may die and leave the others alive (``mpi_faults.py``), what was under way with a dead one is put
aside and its messages are dropped.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from mpi4py import MPI

from mpirpc._core.current import is_forked, stop_all
from mpirpc._core.launcher import find_wrong_belief, find_wrong_start, library_name
from mpirpc._core.mpi_faults import Losses, call_at_finalize, can_survive, end_job, flush, is_loss
from mpirpc._core.timing import UNLIMITED, deadline_after, monotonic
from mpirpc._core.transport import Arrival, Outgoing, TransportStats, check_name
from mpirpc._core.wire import frame_sizes, is_about_rest
from mpirpc.errors import ConfigurationError, RemoteProtocolError, TransportError, WorkerLostError

TAG = 0
SMALL_HEAD = 4096
"""Heads up to this size are received at once: MPI has them in a buffer when the probe sees them."""

ARRIVALS_PER_POLL = 8

JOIN_NOTICE = 60.0
"""Seconds in ``init_rpc`` after which a rank says that it waits for others."""

log = logging.getLogger("mpirpc.transport")

_abandoned: list[object] = []
"""What groups that ended without agreement left: freeing communicators is collective, so all is kept."""


def join_group(
    comm: MPI.Comm | None, name: str | None, rank: int, world_size: int | None, problem: str = ""
) -> tuple[MPI.Comm, list[str]]:
    """Meet the other workers: one collective on ``comm``. Blocks until every rank has called it.

    Args:
        comm: Its ranks are the group; None means all ranks of the job.
        name: This worker's name; None means ``worker{rank}``.
        rank: What the program believes its rank to be; -1 if it has no opinion.
        world_size: Likewise; None if it has no opinion.
        problem: What the caller found wrong with this rank, to be raised on all.

    Returns:
        The communicator, and all workers' names in rank order.

    Raises:
        ConfigurationError: On every rank alike: MPI has too low a thread level, a rank was started wrongly or
            holds wrong beliefs, a name is not allowed, or two workers have the same. On this rank alone: MPI
            cannot be used in this process.
    """
    _check_mpi_runs()
    comm = MPI.COMM_WORLD if comm is None else comm
    name = f"worker{comm.rank}" if name is None else name
    problem = problem or _find_problem(comm, name, rank, world_size)
    everyone = [json.loads(text) for text in _allgather(comm, json.dumps([str(name), problem]).encode())]
    names = [entry[0] for entry in everyone]
    problems = [f"rank {place}: {entry[1]}" for place, entry in enumerate(everyone) if entry[1]]
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


@dataclass(slots=True)
class _Incoming:
    """A message of which not everything has come yet.

    ``head_request`` is set until the head is complete; ``frame_requests`` is None until the frames' receives
    are posted.
    """

    head: bytearray
    head_request: MPI.Request | None
    frames: list[torch.Tensor] = field(default_factory=list)
    frame_requests: deque[MPI.Request] | None = None


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
        self._chunk_nbytes = chunk_nbytes
        self._status = MPI.Status()
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
        if self._losses is not None:
            if dest in self._losses.ranks:
                raise WorkerLostError(f"rank {dest} has died")
            if not is_about_rest(message.head):
                self._losses.sent_to[dest] += 1
        self._sent += 1
        self._sent_nbytes += message.nbytes
        if dest == self.rank:
            frames = [frame.clone() for frame in message.frames]
            self._to_myself.append(Arrival(dest, bytearray(message.head), frames))
            return
        try:
            self._post(dest, self._heads, message.head, message.head, len(message.head))
            for frame in message.frames:
                address = frame.data_ptr()
                for at, nbytes in self._chunks(frame.numel()):
                    self._post(
                        dest, self._frames, MPI.buffer.fromaddress(address + at, nbytes), frame, nbytes
                    )
        except MPI.Exception as error:
            if self._losses is not None and is_loss(error):
                self._lose()
                raise WorkerLostError(f"rank {dest} has died") from error
            raise _translate(error, f"sending {message.nbytes} bytes to rank {dest}") from error

    def _post(self, dest: int, comm: MPI.Comm, buffer: object, keep: object, nbytes: int) -> None:
        request = comm.Isend([buffer, nbytes, MPI.BYTE], dest, TAG)
        if request.Test():
            return
        self._unfinished.setdefault(dest, deque()).append((request, keep, nbytes))
        self._unfinished_nbytes[dest] = self._unfinished_nbytes.get(dest, 0) + nbytes

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
            self._probe(arrivals)
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
            self._received += 1
            self._received_nbytes += arrival.nbytes
            if self._losses is not None and not is_about_rest(arrival.head):
                self._losses.received_from[arrival.source] += 1
        return arrivals

    def _probe(self, arrivals: list[Arrival]) -> None:
        """Take new heads; those that are whole messages already go to ``arrivals``."""
        status = self._status
        for _ in range(ARRIVALS_PER_POLL):
            found = self._heads.Improbe(MPI.ANY_SOURCE, TAG, status)
            if found is None:
                return
            source, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
            head = bytearray(nbytes)
            if nbytes > SMALL_HEAD:
                self._later(source, _Incoming(head, found.Irecv([head, nbytes, MPI.BYTE])))
                continue
            found.Recv([head, nbytes, MPI.BYTE])
            if source in self._incoming or _frame_sizes(head):
                self._later(source, _Incoming(head, None))
            else:
                arrivals.append(Arrival(source, head, []))

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
                if incoming.head_request is not None and not incoming.head_request.Test():
                    queue.appendleft(incoming)
                    break
                incoming.head_request = None
                if self._receive_frames(source, incoming):
                    arrivals.append(Arrival(source, incoming.head, incoming.frames))
                else:
                    left.append(incoming)
            left.extend(queue)
            if left:
                self._incoming[source] = left
            else:
                del self._incoming[source]

    def _receive_frames(self, source: int, incoming: _Incoming) -> bool:
        """Post the receives of a message's frames, or look after them; say whether all are here."""
        requests = incoming.frame_requests
        if requests is None:
            requests = incoming.frame_requests = deque()
            for nbytes in _frame_sizes(incoming.head):
                frame = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                incoming.frames.append(frame)
                for at, size in self._chunks(nbytes):
                    into = MPI.buffer.fromaddress(frame.data_ptr() + at, size)
                    requests.append(self._frames.Irecv([into, size, MPI.BYTE], source, TAG))
        while requests and requests[0].Test():
            requests.popleft()
        return not requests

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
        if self._losses is not None and graceful:
            flush([request for queue in self._unfinished.values() for request, _, _ in queue])
            graceful = False
        if graceful:
            for queue in self._unfinished.values():
                MPI.Request.Waitall([request for request, _, _ in queue])
            self._unfinished.clear()
            self._heads.Free()
            self._frames.Free()
        else:
            # MPI may still read and write these buffers
            _abandoned.append((self._heads, self._frames, self._unfinished, self._incoming, self._sum))

    def abort(self) -> None:
        """End every rank of the job at once (MPI_Abort); where the others survive it, this one alone."""
        end_job(1)


def _frame_sizes(head: bytearray) -> list[int]:
    """Return the sizes of the frames behind ``head``; none if it is not ours (its handler refuses it)."""
    try:
        return frame_sizes(head)
    except RemoteProtocolError:
        return []


def _translate(error: MPI.Exception, doing: str) -> TransportError:
    return TransportError(
        f"MPI failed while {doing}: {error.Get_error_string()} (class {error.Get_error_class()})"
    )
