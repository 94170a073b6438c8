"""Requests and responses: ids, pending requests, deadlines, dispatch of messages by kind.

Nothing here knows what a call is. Upper layers register a handler per kind of message and turn responses into
results.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from mpirpc._core import wire
from mpirpc._core.devices import DeviceMap
from mpirpc._core.error_transfer import fresh
from mpirpc._core.executor import Executor
from mpirpc._core.flow import Flow
from mpirpc._core.messages import Body, CallResponse, ErrorResponse, ForkDescriptor, Leave, Message, RRefId
from mpirpc._core.profiling import Span
from mpirpc._core.progress import ProgressEngine
from mpirpc._core.timing import UNLIMITED, monotonic
from mpirpc._core.transport import Arrival, Transport, check_name
from mpirpc._core.waiter import Waiter
from mpirpc._core.wire import Incoming
from mpirpc.errors import (
    ConfigurationError,
    NotInitializedError,
    RemoteProtocolError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from mpirpc.options import MPIRpcBackendOptions

log = logging.getLogger("mpirpc.agent")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id; the id is its rank in the group.

    Raises:
        ConfigurationError: The name is not allowed.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if problem := check_name(self.name):
            raise ConfigurationError(problem)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.id})"


class Pending(Waiter):
    """A request that waits for its response.

    Attributes:
        incoming: The response; set before ``done``.
        error: What ended the request without a response; set before ``done``.
        what: The function called, or the RRef fetched; for messages.
        on_done: If set, called instead of ``set`` when the request is over, by the thread that found out.
        on_late: If set, called if the request ended without a response, and one comes after all.
        counted: Bytes that :class:`Flow` has counted for it.
        future: What ``on_done`` fulfils, if that is a future.
        span: If the call is profiled: where the time it takes is noted.
    """

    __slots__ = (
        "counted",
        "deadline",
        "dest",
        "error",
        "future",
        "incoming",
        "on_done",
        "on_late",
        "request_id",
        "span",
        "timeout",
        "what",
    )

    def __init__(self, request_id: int, dest: int, timeout: float, what: object) -> None:
        self.done = False
        self._is_woken = False
        self._parking = None
        self._bell = None
        self.request_id = request_id
        self.dest = dest
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout > 0 else UNLIMITED
        self.what = what
        self.incoming: Incoming | None = None
        self.error: BaseException | None = None
        self.on_done: Callable[[Pending], None] | None = None
        self.on_late: Callable[[], None] | None = None
        self.counted = 0
        self.future: Any = None
        self.span: Span | None = None


Handler = Callable[[int, Incoming], None]
"""Gets the sender's rank and the message. Never blocks; leaves user code to the executor."""


class Agent:
    """Sends requests, keeps those that wait, and gives each message that arrives to its handler.

    Args:
        transport: The group's network.
        workers: All workers of the group; the place is the rank.
        options: Settings.
        prepare_thread: Called first on each executor thread.
    """

    def __init__(
        self,
        transport: Transport,
        workers: Sequence[WorkerInfo],
        options: MPIRpcBackendOptions,
        prepare_thread: Callable[[], None],
    ) -> None:
        self.rank = transport.rank
        self.workers = list(workers)
        self.options = options
        self._transport = transport
        self._bell = transport.bell
        self._eager_limit = options.eager_limit
        self.engine = ProgressEngine(transport, self._on_arrival, options.spin_time, options.idle_sleep)
        self.engine.on_alarm = self._expire
        self.engine.on_failure = self._fail_all
        name = f"mpirpc-{workers[self.rank].name}"
        self.executor = Executor(self.engine, options.num_worker_threads, name, prepare_thread)
        self.handlers: dict[type, Handler] = {Leave: self._on_leave}
        self.num_requests = 0
        self._by_name = {worker.name: worker for worker in workers}
        self.next_id = itertools.count(1).__next__
        """Return a number not used before in this generation."""
        # request_id -> request: request() adds; the response, the deadline or the end of the group removes
        self._pending: dict[int, Pending] = {}
        self._late: Callable[[int, Incoming], None] = lambda source, incoming: None
        # request_id -> what to do should its response still come; _end() adds, the response removes
        self._overdue: dict[int, Callable[[], None]] = {}
        self._device_maps: dict[int, DeviceMap] = {
            self.find_worker(name).id: device_map for name, device_map in options.device_maps.items()
        }
        self.closed_because = ""  # why the group has ended here; nothing while it has not
        self.left: set[int] = set()  # workers that left without agreement; _on_leave() adds
        self.lost: set[int] = set()  # those of them that died; _on_death() adds
        self._flow = Flow(transport, options.max_unfinished_nbytes, self.left)
        self.on_left: Callable[[int], None] = lambda rank: None
        # handles leave for a worker
        self.on_forks: Callable[[int, Sequence[ForkDescriptor]], None] = lambda dest, forks: None
        transport.on_lost = self._note_death

    # --- workers ---

    @property
    def me(self) -> WorkerInfo:
        """This worker."""
        return self.workers[self.rank]

    def find_worker(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return the worker that a name, a rank or a WorkerInfo means.

        Raises:
            UnknownWorkerError: There is none.
        """
        kind = type(to)
        if kind is str:
            found = self._by_name.get(to)  # type: ignore[arg-type]
            if found is not None:
                return found
        elif kind is int:
            if 0 <= to < len(self.workers):  # type: ignore[operator]
                return self.workers[to]  # type: ignore[index]
        elif isinstance(to, WorkerInfo):
            if self._by_name.get(to.name) == to:
                return to
        elif isinstance(to, str):
            return self.find_worker(str(to))
        elif isinstance(to, int) and kind is not bool:
            return self.find_worker(int(to))
        names = ", ".join(str(worker) for worker in self.workers[:16])
        more = f" and {len(self.workers) - 16} more" if len(self.workers) > 16 else ""
        raise UnknownWorkerError(f"{self.me} called unknown worker {to!r}; known workers: {names}{more}")

    def describe(self, rank: int) -> str:
        """Return ``'name' (rank r)``."""
        return str(self.workers[rank])

    # --- sending ---

    def send(
        self,
        dest: int,
        message: Message,
        body: Body | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Send a message that waits for no response. Thread: any. Progress: never blocks.

        Raises:
            SerializationError: A tensor of the body is on a device that has no place at ``dest``.
        """
        outgoing = wire.encode(message, body, self._eager_limit, self._device_maps.get(dest))
        outgoing.on_failed = on_failed
        if body is not None and body.forks:
            self.on_forks(dest, body.forks)
        self.engine.submit(dest, outgoing)

    def get_ready(self, dest: int) -> None:
        """A request to ``dest`` is about to be made: refuse if that cannot be, wake a worker that sleeps.

        Raises:
            NotInitializedError: The group has ended here.
        """
        if self.closed_because or self.engine.failure is not None:
            self.check_open()
        if self._bell is not None:
            self._bell.rouse(dest)

    def check_open(self) -> None:
        """Raise NotInitializedError if the group has ended here."""
        if self.closed_because:
            raise NotInitializedError(f"no call can be made any more: {self.closed_because}")
        if self.engine.failure is not None:
            raise fresh(self.engine.failure)

    def request(self, message: Message, body: Body | None, pending: Pending) -> None:
        """Send a message whose response, error or timeout ends ``pending``.

        Thread: any.   Progress: blocks while too much is under way to the callee, see ``flow.py``.

        The caller has made sure that the group is open (:meth:`check_open`).

        Raises:
            NotInitializedError: The group was shut down meanwhile.
            RpcTimeoutError: The deadline passed before anything was sent.
            SerializationError: A tensor of the body is on a device that has no place at the callee.
        """
        flow, dest, counts = self._flow, pending.dest, pending.on_done is not None
        outgoing = wire.encode(message, body, self._eager_limit, self._device_maps.get(dest))
        if flow.is_clogged(dest) or (counts and flow.is_full(dest)):
            unanswered = counts and not self.executor.owns_this_thread()
            if not self.wait(flow.below_limit(dest, unanswered), pending.deadline):
                raise flow.held_up(name_of(pending.what), self.describe(dest), pending.timeout)
            self.check_open()
        if counts:
            pending.counted = flow.add(dest, outgoing.nbytes)
        outgoing.on_failed = lambda error: self._end(
            pending, self._lost(pending) if isinstance(error, WorkerLostError) else error
        )
        self.num_requests += 1
        self._pending[pending.request_id] = pending
        if self.closed_because:  # stop() may have looked before this was added
            self._end(pending, NotInitializedError(f"the call was pending when {self.closed_because}"))
            return
        engine = self.engine
        if pending.deadline < engine.alarm_at:
            engine.alarm_at = pending.deadline
        if body is not None and body.forks:
            self.on_forks(dest, body.forks)
        if dest in self.left:
            self._end(pending, self._lost(pending))
        else:
            engine.submit(dest, outgoing)

    def wait(self, goal: Waiter, deadline: float = UNLIMITED) -> bool:
        """Wait until ``goal.done`` or the deadline; say whether it is. Thread: any. Progress: drives it."""
        executor = self.executor
        if not executor.owns_this_thread():
            return self.engine.wait(goal, deadline)
        executor.begin_wait()
        try:
            return self.engine.wait(goal, deadline)
        finally:
            executor.end_wait()

    def wait_response(self, pending: Pending) -> None:
        """Wait until ``pending`` is over; on return its ``incoming`` or its ``error`` is set.

        If the wait is broken off (Ctrl-C), the request is forgotten: a late response is dropped.
        """
        try:
            is_work = get_ident() in self.executor.threads
            if not (self.wait if is_work else self.engine.wait)(pending, pending.deadline):
                self._end(pending, self._timeout(pending))
                pending.done or self.wait(pending)
        except BaseException:
            if pending.on_done is None:  # a future may be waited for again
                self._pending.pop(pending.request_id, None)
            raise

    # --- receiving ---

    def _on_arrival(self, arrival: Arrival) -> None:
        """Handle one message: thread that polled, no lock held."""
        source = arrival.source
        try:
            incoming = wire.decode(arrival.head, arrival.frames)
            kind = incoming.kind
            if kind is CallResponse or kind is ErrorResponse:
                self._on_response(source, incoming)
            else:
                self.handlers[kind](source, incoming)
        except RpcError as error:
            log.error("a message was refused: source=%s error=%s", self.describe(source), error)

    def _on_response(self, source: int, incoming: Incoming) -> None:
        request_id = incoming.request_id
        pending = self._pending.pop(request_id, None)
        if pending is None:
            log.debug("late response dropped: source=%d request=%d", source, request_id)
            self._late(source, incoming)
            overdue = self._overdue.pop(request_id, None)
            if overdue is not None:
                overdue()
            return
        if pending.dest != source:
            self._pending[request_id] = pending
            raise RemoteProtocolError(
                f"{self.describe(source)} answered request {request_id}, "
                f"which went to {self.describe(pending.dest)}"
            )
        pending.incoming = incoming
        if pending.on_done is None:
            pending.set()
        else:
            self._over(pending)

    def on_late_response(self, handler: Callable[[int, Incoming], None]) -> None:
        """Set what releases the contents of a response that nobody waits for any more."""
        self._late = handler

    def _on_leave(self, source: int, _incoming: Incoming) -> None:
        """A worker left without agreement."""
        self._lose(source)

    def _note_death(self, rank: int) -> None:
        """The transport found out that a worker is dead. Thread: holds the engine's lock."""
        self.engine.chores.append((self._on_death, rank))

    def _on_death(self, rank: int) -> None:
        log.warning("a worker has died: worker=%s", self.describe(rank))
        self.lost.add(rank)
        self._lose(rank)

    def _lose(self, source: int) -> None:
        """Note that a worker is gone: nothing that waits for it will be answered."""
        self.left.add(source)
        self.on_left(source)
        for pending in list(self._pending.values()):
            if pending.dest == source:
                self._end(pending, self._lost(pending))

    def _lost(self, pending: Pending) -> WorkerLostError:
        if pending.dest in self.lost or pending.dest not in self.left:  # or not told of yet
            return WorkerLostError(
                f"{self.describe(pending.dest)} has died: no response to request {pending.request_id} "
                f"({name_of(pending.what)})",
                "look at its output, and at the launcher's: the reason is there",
            )
        return WorkerLostError(
            f"{self.describe(pending.dest)} left the group without waiting for it: no response to request "
            f"{pending.request_id} ({name_of(pending.what)})",
            "it called shutdown(graceful=False), or its shutdown failed",
        )

    def _end(self, pending: Pending, error: BaseException) -> None:
        """End a request without a response, unless it is over already."""
        request_id = pending.request_id
        # after a timeout the call still runs, or waits, at the callee
        stays_counted = pending.counted > 0 and isinstance(error, RpcTimeoutError)
        if (stays_counted or pending.on_late is not None) and pending.error is None:
            # before the pop: a response may come in between
            self._overdue[request_id] = partial(self._came_late, pending, stays_counted)
        if self._pending.pop(request_id, None) is not None:
            pending.error = error
            self._over(pending, stays_counted)
        elif pending.error is None:
            self._overdue.pop(request_id, None)

    def _came_late(self, pending: Pending, was_counted: bool) -> None:
        if was_counted:
            self._flow.remove(pending.dest, pending.counted)
        if pending.on_late is not None:
            pending.on_late()

    def _over(self, pending: Pending, stays_counted: bool = False) -> None:
        if pending.counted and not stays_counted:
            self._flow.remove(pending.dest, pending.counted)
        on_done, pending.on_done = pending.on_done, None  # it holds the future that holds this
        if on_done is None:
            pending.set()
        elif pending.error is not None and not self.executor.is_stopping:
            # others may fail at the same time, and a callback of this one may wait for them
            self.executor.submit_urgent(partial(on_done, pending))
        else:
            on_done(pending)

    # --- deadlines and the end ---

    def _timeout(self, pending: Pending) -> RpcTimeoutError:
        others = sum(other.dest == pending.dest for other in list(self._pending.values())) - 1
        also = f"; {others} more requests to it are pending" if others > 0 else ""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({pending.timeout:g} s): no response from "
            f"{self.describe(pending.dest)} to request {pending.request_id} ({name_of(pending.what)}){also}",
            "raise timeout=, or look at the callee: the call may still be running there",
            worker=self.describe(pending.dest),
            timeout=pending.timeout,
        )

    def _expire(self, now: float) -> float:
        """End requests whose deadline has passed; return the next deadline."""
        soonest = UNLIMITED
        for pending in list(self._pending.values()):
            if pending.deadline <= now:
                self._end(pending, self._timeout(pending))
            elif pending.deadline < soonest:
                soonest = pending.deadline
        return soonest

    def _fail_all(self, error: RpcError) -> None:
        for pending in list(self._pending.values()):
            self._end(pending, error)

    @property
    def num_pending(self) -> int:
        """Requests that wait for their response."""
        return len(self._pending)

    @property
    def is_closed(self) -> bool:
        """Say whether the group has ended here."""
        return bool(self.closed_because)

    def is_quiet(self) -> bool:
        """Say whether nothing is pending, being handled, running or queued here."""
        engine = self.engine
        return not (
            engine.has_in_hand  # first: what it leads to is one of the others
            or self._pending
            or self.executor.is_busy
            or engine.works
            or engine.urgent
            or engine.chores
        )

    def stop(self, why: str, graceful: bool) -> None:
        """End: refuse new requests, fail those pending, stop the threads, close the transport.

        Not graceful: the others are told, so that they do not wait for this worker; nobody waits until they
        know.
        """
        self.closed_because = why
        if not graceful:
            for worker in self.workers:
                if worker.id != self.rank and worker.id not in self.left:
                    self.send(worker.id, Leave())
        self._fail_all(NotInitializedError(f"the call was pending when {why}"))
        self.executor.stop()
        self.engine.close(graceful)
        urgent = self.engine.urgent
        while urgent:  # what no thread has come to: futures are completed, and waits in their callbacks raise
            urgent.popleft()()

    def forsake(self, why: str) -> None:
        """In a forked child: refuse all work, as after the end, but close and stop nothing."""
        self.closed_because = why
        self.engine.forsake(why)


def name_of(func: object) -> str:
    """Return the name of what is called, for messages: ``module.qualname`` of a function that has one."""
    if isinstance(func, RRefId):
        return f"to_here of rref {func}"
    name = getattr(func, "__qualname__", None) or getattr(func, "name", None) or type(func).__qualname__
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def seconds_left(deadline: float) -> float:
    """Return the seconds until ``deadline``, not below 0."""
    return max(0.0, deadline - monotonic())
