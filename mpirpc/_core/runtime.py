"""``Runtime``: builds, owns, starts and stops the parts of one worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from mpirpc._core import interrupts, profiler_hooks
from mpirpc._core import messages as m
from mpirpc._core.agent import Agent, WorkerInfo, seconds_left
from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.call import Calls
from mpirpc._core.contents import Contents
from mpirpc._core.current import add_runtime, set_thread_runtime
from mpirpc._core.error_transfer import dump_error, fresh, load_error
from mpirpc._core.gathering import Gathering
from mpirpc._core.messages import Body, ForkDescriptor, Message
from mpirpc._core.pickling import RRefHook
from mpirpc._core.rref_store import RRefStore
from mpirpc._core.serve import Server
from mpirpc._core.survivors import Survivors
from mpirpc._core.timing import deadline_after, monotonic
from mpirpc._core.transport import Transport
from mpirpc._core.waiter import Waiter
from mpirpc._core.wire import ordinary_tensors
from mpirpc.errors import (
    LocalProtocolError,
    NotInitializedError,
    RpcTimeoutError,
    RRefError,
    WorkerLostError,
)
from mpirpc.options import MPIRpcBackendOptions
from mpirpc.rref import RRef

log = logging.getLogger("mpirpc.runtime")

QUIET_LOOK = 5e-4
"""Seconds between two looks, at shutdown, whether this worker has come to rest."""


class _AutogradEvent:
    """Something that a backward pass waits for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._waiter = Waiter()

    def set(self) -> None:
        self._waiter.set()

    def wait(self, deadline: float) -> bool:
        return self._agent.wait(self._waiter, deadline)


class _AutogradPorts:
    """What the autograd engine sees of the other parts."""

    def __init__(self, agent: Agent) -> None:
        self.rank = agent.rank
        self._agent = agent
        self.describe = agent.describe
        self.start = agent.executor.submit_urgent
        self.dump_error = dump_error

    def send(self, dest: int, message: Message, body: Body | None = None) -> None:
        self._agent.send(dest, message, body)

    def new_event(self) -> _AutogradEvent:
        return _AutogradEvent(self._agent)

    def load_error(self, source: int, body: Body) -> BaseException:
        return load_error(body, self._agent.describe(source), "backward")


class Runtime:
    """One worker: its agent, RRefs, autograd engine and calls. Several may live in one process.

    Args:
        transport: This worker's end of the group's network; closed by :meth:`shutdown`.
        workers: All workers; the place is the rank.
        options: Settings.
    """

    def __init__(
        self, transport: Transport, workers: Sequence[WorkerInfo], options: MPIRpcBackendOptions
    ) -> None:
        self.transport = transport
        self.options = options
        self.agent = Agent(transport, workers, options, self._prepare_thread)
        self.store = RRefStore(self.agent)
        self.autograd = AutogradEngine(_AutogradPorts(self.agent))
        self.agent.on_left = self._lose
        for kind in (m.BackwardBegin, m.Gradient, m.BackwardAck, m.BackwardFailed, m.ContextRelease):
            self.agent.handlers[kind] = self._on_autograd
        hook = RRefHook(RRef, self._fork, self.store.cancel_fork, options.reducers)
        contents = Contents(self.store, self.autograd, hook, self._make_rref)
        self.calls = Calls(self.agent, contents)
        self.server = Server(self.agent, self.store, contents)
        self.gathering = Gathering(self.calls)
        self._survivors = Survivors(self.agent, transport) if transport.survives_losses else None
        self.is_running = True
        self._ending = threading.Lock()  # held while this worker agrees with the others to stop
        add_runtime(self)
        interrupts.hold_back(self)
        profiler_hooks.install()
        self.agent.executor.start()

    def _prepare_thread(self) -> None:
        set_thread_runtime(self)
        torch.get_num_threads()  # makes torch apply set_num_threads to this thread too

    def _lose(self, rank: int) -> None:
        self.store.lose(rank, rank in self.agent.lost)
        self.autograd.lose(rank)
        self.gathering.rounds.lose(self.agent.workers[rank].name)

    def _on_autograd(self, source: int, incoming: Any) -> None:
        with ordinary_tensors():
            body, _ = incoming.body()
            self.autograd.on_message(source, incoming.message, body)

    def _fork(self, rref: RRef[Any]) -> ForkDescriptor:
        rref._check_alive("Cannot call fork an UserRRef after deletion.")
        rref._check_creation()
        return self.store.fork(rref._rref_id, rref._fork_id, rref._owner)

    def _make_rref(self, fork: ForkDescriptor) -> RRef[Any]:
        return RRef._adopted(self.calls, fork)

    # --- the end ---

    def shutdown(self, graceful: bool, timeout: float, ignore_leaks: bool = False) -> None:
        """Stop this worker.

        Graceful: together with all others, once no call runs or is under way anywhere; handles that user code
        still holds are released, then values that are still referenced are reported.

        Raises:
            LocalProtocolError: Called by a function that runs as a call.
            RpcTimeoutError: The others did not come to rest in time; this worker has stopped all the same.
            NotInitializedError: Another thread stopped this worker without asking meanwhile.
            WorkerLostError: Another one has stopped without agreement; this worker has stopped too.
            RRefError: Values are still referenced (see ``ignore_leaks``); this worker has stopped all the
                same.
        """
        if self.agent.executor.owns_this_thread():
            raise LocalProtocolError(
                "shutdown() was called by a function that runs as a call", "call it on the main thread"
            )
        if not graceful:
            self._stop(False)
            return
        deadline = deadline_after(timeout)
        if not self._ending.acquire(timeout=min(seconds_left(deadline), threading.TIMEOUT_MAX)):
            raise RpcTimeoutError(f"shutdown of {self.agent.me} timed out: another thread is at it")
        try:
            if self.is_running:
                self._end_together(deadline, ignore_leaks)
        finally:
            self._ending.release()

    def _end_together(self, deadline: float, ignore_leaks: bool) -> None:
        """Come to rest with all others, let RRefs go, stop."""
        leaks: list[str] = []
        agreed = False
        try:
            self._come_to_rest(deadline)
            self.store.release_all_users()
            self._come_to_rest(deadline)
            leaks = self.store.leaks()
            agreed = True
        finally:
            self._stop(agreed)
        if leaks and not ignore_leaks:
            raise RRefError(
                f"Leaking RRefs: {len(leaks)} values of {self.agent.me} are still referenced at shutdown: "
                + "; ".join(leaks),
                "this is a bug in mpirpc: please report it",
            )

    def _come_to_rest(self, deadline: float) -> None:
        """Wait until no worker has anything to do and no message is under way.

        All workers add up messages sent, messages received and how many of them are busy. Twice the same sums
        with nobody busy and as many received as sent: nothing happened in between, and nothing can happen any
            more (Mattern's
        four counters).
        """
        if self._survivors is not None:
            self._survivors.come_to_rest(self._is_quiet, self._wait_until, deadline)
            return
        before: list[int] = []
        while True:
            self._wait_until(self._is_quiet, deadline)
            with self.agent.engine.stopped():
                stats = self.transport.stats()
            busy = 0 if self._is_quiet() else 1  # second: what was counted may be in somebody's hands
            waiter = self.agent.engine.post_sum([stats.messages_sent, stats.messages_received, busy])
            self.agent.engine.wake()
            self._wait_until(lambda: waiter.done, deadline, waiter)  # noqa: B023
            sums = self.agent.engine.sums
            if sums == before and sums[0] == sums[1] and sums[2] == 0:
                return
            before = sums

    def _is_quiet(self) -> bool:
        return (
            self.agent.is_quiet()
            and self.store.is_quiet()
            and self.server.num_open == 0
            and not self.transport.has_unfinished()
        )

    def _wait_until(self, is_done: Callable[[], bool], deadline: float, waiter: Waiter | None = None) -> None:
        """Park until something is true: executor threads look after the network meanwhile."""
        waiter = waiter or Waiter()
        pause = QUIET_LOOK
        while not is_done():
            interrupts.raise_noted()
            if self.agent.engine.failure is not None:
                raise fresh(self.agent.engine.failure)
            if self.agent.is_closed:
                raise NotInitializedError(
                    f"shutdown of {self.agent.me} was overtaken by shutdown(graceful=False)"
                )
            if deserters := self.agent.left - self.agent.lost:  # the dead may be survived
                raise WorkerLostError(
                    f"shutdown of {self.agent.me} cannot be graceful: "
                    f"{', '.join(map(self.agent.describe, sorted(deserters)))} left without waiting"
                )
            if monotonic() >= deadline:
                raise RpcTimeoutError(
                    f"shutdown of {self.agent.me} timed out: {self._what_is_open()}",
                    "another worker has not called shutdown() yet, or a call does not end",
                    worker=str(self.agent.me),
                )
            waiter.park(min(pause, seconds_left(deadline)))
            pause = min(2 * pause, 0.05)

    def _what_is_open(self) -> str:
        return (
            f"{self.agent.num_pending} requests pending, {self.server.num_open} calls not answered, "
            f"{self.store.stats().pending} RRef handles unconfirmed here"
        )

    def _stop(self, graceful: bool) -> None:
        self.is_running = False
        self.autograd.close(NotInitializedError("a backward pass was under way when RPC was shut down"))
        self.agent.stop("mpirpc.shutdown was called", graceful)
        interrupts.stop_holding_back(self)

    def forsake(self, why: str) -> None:
        """In a forked child: refuse all work, touch neither the network nor a lock. Thread: the only one."""
        self.is_running = False
        self.agent.forsake(why)

    # --- looking in ---

    def debug_info(self) -> dict[str, Any]:
        """Return counts of what lives here and what was done; ``api.debug_info`` explains them."""
        transport, rrefs = self.transport.stats(), self.store.stats()
        gil_wait = self.agent.engine.gil_wait
        return {
            **({} if gil_wait is None else {"gil_wait_us": gil_wait.average_us}),
            "calls_sent": self.agent.num_requests,
            "calls_served": self.server.num_served,
            "pending_calls": self.agent.num_pending,
            "open_calls": self.server.num_open,
            "messages_sent": transport.messages_sent,
            "messages_received": transport.messages_received,
            "bytes_sent": transport.bytes_sent,
            "bytes_received": transport.bytes_received,
            "unfinished_nbytes": transport.unfinished_nbytes,
            "owned_rrefs": rrefs.owned,
            "used_rrefs": rrefs.used,
            "forks": rrefs.forks,
            "pending_rrefs": rrefs.pending,
            "lost_workers": sorted(self.agent.workers[rank].name for rank in self.agent.lost),
            "executor_threads": self.agent.executor.num_threads_alive,
            "running_calls": self.agent.executor.num_running,
            **{f"autograd_{name}": count for name, count in asdict(self.autograd.stats()).items()},
        }

    def __repr__(self) -> str:
        return f"Runtime({self.agent.me}, {'running' if self.is_running else 'stopped'})"
