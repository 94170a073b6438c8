"""Keeps RRef values and handles, and carries out what the protocol decides.

One lock around the two tables and the values; messages and frees happen after it is released. Finalizers of
handles only append to the engine's chores, which end in :meth:`RRefStore.release_user` and
:meth:`RRefStore.drop_owner`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpirpc._core import messages as m
from mpirpc._core.agent import Agent, WorkerInfo
from mpirpc._core.messages import NO_FORK, ForkDescriptor, ForkId, RRefId
from mpirpc._core.rref_protocol import Action, FreeValue, OwnerTable, Send, UserTable
from mpirpc._core.waiter import Waiter
from mpirpc._core.wire import Incoming
from mpirpc.errors import RRefError

log = logging.getLogger("mpirpc.rref")


class OwnerValue:
    """An RRef's value at its owner, or the exception of the call that should have made it, or neither yet.

    Attributes:
        ready: Done once there is one.
        value: The object.
        error: The exception.
        what: What makes the value, or whose call does; for leak reports.
    """

    __slots__ = ("error", "ready", "value", "waiting", "what")

    def __init__(self, what: str | WorkerInfo) -> None:
        self.ready = Waiter()
        self.value: Any = None
        self.error: BaseException | None = None
        self.what = what
        self.waiting: list[Callable[[], None]] = []  # called once ready; emptied then


@dataclass(frozen=True, slots=True)
class RRefStats:
    """Counts of living RRefs at one worker."""

    owned: int
    used: int
    forks: int
    pending: int


class RRefStore:
    """The RRefs of one worker.

    Args:
        agent: Sends messages; handlers for the protocol's messages are registered with it.
    """

    def __init__(self, agent: Agent) -> None:
        self.rank = agent.rank
        self._agent = agent
        self._lock = threading.Lock()  # around the tables and _values
        self._owned = OwnerTable(agent.rank)
        self._used = UserTable(agent.rank)
        # create() adds, FreeValue removes; an entry not known to _owned waits for its creating call to arrive
        self._values: dict[RRefId, OwnerValue] = {}
        # unconfirmed handle -> its owner, and what waits for the owner's word; when_confirmed() adds
        self._awaited: dict[ForkId, tuple[int, Callable[[], None]]] = {}
        self._ids = itertools.count(1)
        agent.handlers |= {
            m.ForkRequest: self._handler(self._owned.on_fork_request),
            m.UserDelete: self._handler(self._owned.on_user_delete),
            m.ForkAccept: self._on_fork_accept,
            m.ChildAccept: self._handler(self._used.on_child_accept),
        }
        agent.on_forks = self.note_sent

    def _handler(self, decide: Callable[[int, Any], list[Action]]) -> Callable[[int, Incoming], None]:
        def handle(source: int, incoming: Incoming) -> None:
            with self._lock:
                actions = decide(source, incoming.message)
            self._do(actions)

        return handle

    def _on_fork_accept(self, source: int, incoming: Incoming) -> None:
        message = incoming.message
        assert isinstance(message, m.ForkAccept)
        with self._lock:
            actions = self._used.on_fork_accept(source, message)
            awaited = self._awaited.pop(message.fork_id, None)
        self._do(actions)
        if awaited is not None:
            awaited[1]()

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out what a table decided. The lock is not held."""
        for action in actions:
            if isinstance(action, Send):
                self._agent.send(action.dest, action.message)
            else:
                self._free(action)

    def _free(self, action: FreeValue) -> None:
        with self._lock:
            value = self._values.pop(action.rref_id, None)
        del value  # user destructors run here, with no lock held

    # --- ids ---

    def new_rref_id(self) -> RRefId:
        """Return a name for a new value."""
        return m.new_of(RRefId, (self.rank, next(self._ids)))

    def new_fork_id(self) -> ForkId:
        """Return a name for a new handle."""
        return m.new_of(ForkId, (self.rank, next(self._ids)))

    # --- values, at the owner ---

    def create(self, rref_id: RRefId, what: str | WorkerInfo, first_fork: ForkId = NO_FORK) -> OwnerValue:
        """Make the place of a value. Without a fork, the caller gets an owner handle to drop in time."""
        with self._lock:
            self._owned.create(rref_id, None if first_fork == NO_FORK else first_fork)
            if first_fork == NO_FORK:
                self._owned.hold(rref_id)
            value = self._values.setdefault(rref_id, OwnerValue(what))
            value.what = what
        return value

    def set_value(self, value: OwnerValue, result: Any, error: BaseException | None = None) -> None:
        """Fill in a value, or the exception in its place, and serve those who wait for it."""
        with self._lock:
            value.value, value.error = result, error
            value.ready.done = True
            waiting, value.waiting = value.waiting, []
        value.ready.set()
        for callback in waiting:
            callback()

    def find(self, rref_id: RRefId) -> OwnerValue:
        """Return the place of a value; made now if its creating call has not arrived yet."""
        with self._lock:
            value = self._values.get(rref_id)
            if value is None:
                value = OwnerValue("unknown")
                if self._owned.is_missing(rref_id):
                    value.error, value.ready.done = self._gone(), True
                    return value
                # made here and not owned: freed already, nobody will look for it
                if rref_id.created_on != self.rank or rref_id in self._owned:
                    self._values[rref_id] = value
            return value

    def when_ready(self, value: OwnerValue, callback: Callable[[], None]) -> None:
        """Call ``callback`` (which must not block) once ``value`` is there; at once if it is."""
        with self._lock:
            if not value.ready.done:
                value.waiting.append(callback)
                return
        callback()

    # --- handles ---

    def create_user(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> None:
        """Record the handle that a ``remote`` call makes at the caller."""
        with self._lock:
            self._used.create(rref_id, fork_id, owner)

    def confirm_user(self, fork_id: ForkId) -> None:
        """The response to the ``remote`` call came: the owner knows the handle."""
        with self._lock:
            actions = self._used.on_confirmed(fork_id) if fork_id in self._used else []
        self._do(actions)

    def forget_user(self, fork_id: ForkId) -> None:
        """The ``remote`` call was never sent."""
        with self._lock:
            self._used.forget(fork_id)

    def is_confirmed(self, fork_id: ForkId) -> bool:
        """Say whether the owner knows the handle."""
        with self._lock:
            return fork_id in self._used and self._used.is_confirmed(fork_id)

    def when_confirmed(self, forks: Sequence[ForkDescriptor], callback: Callable[[], None]) -> bool:
        """Say whether the owners know these handles, which were just adopted; if not, call back once they do.

        A handle of an owner that has left is not waited for: using it raises what there is to say.
        """
        with self._lock:
            missing = [
                fork
                for fork in forks
                if fork.fork_id in self._used
                and not self._used.is_confirmed(fork.fork_id)
                and fork.owner not in self._agent.left
            ]
            remaining = len(missing)

            def one_less() -> None:
                nonlocal remaining
                with self._lock:
                    remaining -= 1
                    last = remaining == 0
                if last:
                    callback()

            for fork in missing:
                self._awaited[fork.fork_id] = fork.owner, one_less
        return not missing

    def lose(self, rank: int, is_dead: bool) -> None:
        """A worker has left: its word is not waited for any more. What a dead one held is released."""
        actions: list[Action] = []
        missing: list[OwnerValue] = []
        with self._lock:
            gone = [fork_id for fork_id, (owner, _) in self._awaited.items() if owner == rank]
            awaited = [self._awaited.pop(fork_id) for fork_id in gone]
            if is_dead:
                missing = [
                    value
                    for rref_id, value in self._values.items()
                    if rref_id.created_on == rank and self._owned.is_expected(rref_id)
                ]
                actions = [*self._owned.lose(rank), *self._used.lose(rank)]
        for value in missing:
            self.set_value(value, None, self._gone())
        for _, callback in awaited:
            callback()
        self._do(actions)

    def _gone(self) -> RRefError:
        return RRefError("the value of this RRef is not there: the worker that made it, or held it, has died")

    def note_sent(self, dest: int, forks: Sequence[ForkDescriptor]) -> None:
        """Handles are about to leave for ``dest``: it has them from now on."""
        actions: list[Action] = []
        with self._lock:
            for fork in forks:
                if fork.owner != self.rank:
                    actions += self._used.note_dest(fork.fork_id, dest)
                elif dest in self._agent.lost:
                    actions += self._owned.cancel_fork(fork.rref_id, fork.fork_id)
                else:
                    self._owned.note_holder(fork.rref_id, fork.fork_id, dest)
        self._do(actions)

    def fork(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> ForkDescriptor:
        """Put a handle into a message: ``fork_id`` is the handle's own, NO_FORK at the owner."""
        child = self.new_fork_id()
        with self._lock:
            if owner == self.rank:
                self._owned.add_fork(rref_id, child)
                return ForkDescriptor(rref_id, child, owner, self.rank)
            return self._used.fork(fork_id, child)

    def cancel_fork(self, descriptor: ForkDescriptor) -> None:
        """Take a fork back whose message was never sent."""
        with self._lock:
            if descriptor.owner == self.rank:
                actions = self._owned.cancel_fork(descriptor.rref_id, descriptor.fork_id)
            else:
                child = descriptor.fork_id
                actions = self._used.cancel_fork(self._used.parent_of(child), child)
        self._do(actions)

    def adopt(self, descriptor: ForkDescriptor) -> None:
        """Record a handle that arrived. At its owner it becomes an owner handle, to be dropped in time."""
        with self._lock:
            if descriptor.owner == self.rank:
                self._owned.hold(descriptor.rref_id)
                actions = self._owned.came_home(descriptor)
            else:
                actions = self._used.adopt(descriptor)
        self._do(actions)

    def release_user(self, fork_id: ForkId) -> None:
        """A user handle died, or is released at shutdown."""
        with self._lock:
            actions = self._used.release(fork_id) if self._used.is_held(fork_id) else []
        self._do(actions)

    def drop_owner(self, rref_id: RRefId) -> None:
        """An owner handle died."""
        with self._lock:
            actions = self._owned.drop(rref_id) if rref_id in self._owned else []
        self._do(actions)

    # --- shutdown ---

    def is_quiet(self) -> bool:
        """Say whether no handle waits for a confirmation."""
        with self._lock:
            return self._used.pending() == 0

    def release_all_users(self) -> None:
        """Release every user handle that lives here, though user code still holds it."""
        with self._lock:
            forks = self._used.unreleased()
        for fork_id in forks:
            self.release_user(fork_id)

    def leaks(self) -> list[str]:
        """Describe the values that some worker still holds a handle of."""
        with self._lock:
            return [
                f"rref {rref_id} ({self._describe(rref_id)}) with forks {', '.join(map(str, sorted(forks)))}"
                for rref_id in sorted(self._owned.rrefs())
                if (forks := self._owned.forks(rref_id))
            ]

    def _describe(self, rref_id: RRefId) -> str:
        value = self._values.get(rref_id)
        if value is None:
            return "no value"
        kind = type(value.value).__qualname__ if value.ready.done and value.error is None else "no value"
        what = value.what if isinstance(value.what, str) else f"a call from {value.what}"
        return f"{kind} made by {what} for rank {rref_id.created_on}"

    def stats(self) -> RRefStats:
        """Return the counts of living RRefs."""
        with self._lock:
            owned, used = self._owned.stats(), self._used.stats()
            return RRefStats(owned.entries, used.handles, owned.forks, self._used.pending())
