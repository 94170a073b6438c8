"""Lifetime of RRef values: who must be told what before a value may be freed.

Pure: a message or a local event goes in, a list of actions comes out; ``rref_store.py`` carries them out.
A worker has two tables: :class:`OwnerTable` for the values that live here, :class:`UserTable` for its handles
of values that live elsewhere.

Guarantees (``docs/design/rref.md`` has the reasons, charts and tests):
    G1: the owner is told of every deletion, so a value that nobody holds is freed.
    G2: a handle lives until the owner has confirmed every child made from it, so no value in use is freed.

Assumed of the network: no message is lost or doubled; any may overtake any other, even between one pair.
A worker may die (``docs/design/failure.md``): :meth:`lose` takes back what it held, and nothing more comes
from it.

States::

    value:   [EXPECTED ->] CREATED -> gone   EXPECTED: named by somebody, its ``remote`` call is still to come
    handle:  PENDING -> CONFIRMED -> gone    gone: released here, confirmed, and no child waits for the owner

Rules for this file: check first, then change; a refused message or call leaves the table as it was.

Thread: any, one at a time (the store's lock).   Progress: never blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mpirpc._core.messages import (
    ChildAccept,
    ForkAccept,
    ForkDescriptor,
    ForkId,
    ForkRequest,
    RRefId,
    UserDelete,
)
from mpirpc.errors import LocalProtocolError, ProtocolError, RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send ``message`` to the worker with rank ``dest`` (which may be this one)."""

    dest: int
    message: ForkRequest | ForkAccept | ChildAccept | UserDelete


@dataclass(frozen=True, slots=True)
class FreeValue:
    """Action: drop the local value; nobody can ask for it any more."""

    rref_id: RRefId


Action = Send | FreeValue

NOBODY = -1
"""In place of the rank that has a fork, until its message is sent."""


# --- owner side ---


@dataclass(frozen=True, slots=True)
class OwnerStats:
    """What is in an :class:`OwnerTable`; ``expected`` of its entries wait for their ``remote`` call."""

    entries: int
    expected: int
    forks: int
    holds: int


@dataclass(slots=True)
class _Entry:
    """Who keeps one value alive."""

    created: bool = False  # false is the state EXPECTED; set by create, never cleared
    holds: int = 0  # owner references; up: hold, down: drop
    # fork -> rank that has it; in: create, add_fork, ForkRequest; out: UserDelete, lose
    forks: dict[ForkId, int] = field(default_factory=dict)

    def is_free(self) -> bool:
        return self.created and not self.holds and not self.forks


class OwnerTable:
    """The values that live on worker ``rank``, and who keeps each alive.

    A value dies when its last fork or owner reference goes. A ``remote`` call can be overtaken by what it
    makes possible: its caller passes the handle on, and the request of that child, or the handle itself, gets
    here first. Such a value is EXPECTED: it has an entry, and is not freed before it has been created.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._entries: dict[RRefId, _Entry] = {}  # in: create, or the first mention of it; out: FreeValue
        self._lost: set[int] = set()  # dead workers; lose adds

    def create(self, rref_id: RRefId, first_fork: ForkId | None = None) -> None:
        """Bring an entry to life: a local value, or a ``remote`` call whose caller holds ``first_fork``.

        Raises:
            RemoteProtocolError: A ``remote`` call names a value or fork that exists already.
            LocalProtocolError: The local value exists already.
        """
        entry = self._entries.get(rref_id, _Entry())
        if entry.created:
            error = LocalProtocolError if first_fork is None else RemoteProtocolError
            raise error(f"rref {rref_id} exists already")
        if first_fork is not None:
            self._record(entry, rref_id, first_fork, first_fork.created_on, RemoteProtocolError)
        entry.created = True
        self._entries[rref_id] = entry

    def hold(self, rref_id: RRefId) -> None:
        """Count one more local handle of a value that lives here."""
        self._mention(rref_id, LocalProtocolError).holds += 1

    def drop(self, rref_id: RRefId) -> list[Action]:
        """Count one local handle less."""
        entry = self._held(rref_id)
        entry.holds -= 1
        return self._settle(rref_id, entry)

    def add_fork(self, rref_id: RRefId, fork_id: ForkId) -> None:
        """Record a handle that this worker puts into a message: its user need not ask for it."""
        self._record(self._entry(rref_id, LocalProtocolError), rref_id, fork_id, NOBODY, LocalProtocolError)

    def note_holder(self, rref_id: RRefId, fork_id: ForkId, holder: int) -> None:
        """Note where the message with a fork of :meth:`add_fork` goes."""
        entry = self._entries.get(rref_id)
        if entry is not None and fork_id in entry.forks:
            entry.forks[fork_id] = holder

    def cancel_fork(self, rref_id: RRefId, fork_id: ForkId) -> list[Action]:
        """Undo :meth:`add_fork`: the message was never sent."""
        return self._strike(rref_id, fork_id, LocalProtocolError)

    def on_fork_request(self, source: int, message: ForkRequest) -> list[Action]:
        """Record the fork of a new user and confirm it."""
        where = f", asked for by fork {message.fork_id} from rank {source}"
        if not self._lost or message.rref_id in self._entries:  # else it may have gone with a dead worker
            entry = self._mention(message.rref_id, RemoteProtocolError, where)
            self._record(entry, message.rref_id, message.fork_id, source, RemoteProtocolError)
        return [Send(source, ForkAccept(message.fork_id))]

    def on_user_delete(self, source: int, message: UserDelete) -> list[Action]:
        """Strike out the fork of a user that is done."""
        return self._strike(message.rref_id, message.fork_id, RemoteProtocolError, source)

    def lose(self, rank: int) -> list[Action]:
        """Take back what worker ``rank``, now dead, held. Its ``remote`` calls that have not come never will.

        A handle that it sent on just before, and whose request is still on its way, loses its value; who asks
        is answered all the same.
        """
        self._lost.add(rank)
        actions: list[Action] = []
        for rref_id, entry in list(self._entries.items()):
            entry.created = entry.created or rref_id.created_on == rank
            entry.forks = {fork_id: holder for fork_id, holder in entry.forks.items() if holder != rank}
            actions += self._settle(rref_id, entry)
        return actions

    def is_missing(self, rref_id: RRefId) -> bool:
        """Tell whether a value is neither here nor to come, since a worker died."""
        entry = self._entries.get(rref_id)
        return entry is None and bool(self._lost) and rref_id.created_on in {self.rank, *self._lost}

    def is_expected(self, rref_id: RRefId) -> bool:
        """Tell whether a value's ``remote`` call has not come yet."""
        entry = self._entries.get(rref_id)
        return entry is None or not entry.created

    def came_home(self, descriptor: ForkDescriptor) -> list[Action]:
        """Take in a handle that arrived at its owner, for which :meth:`hold` was called just before.

        A parent elsewhere is told that it may go. A fork that this worker recorded for itself is struck out.
        """
        rref_id, fork_id = descriptor.rref_id, descriptor.fork_id
        if descriptor.owner != self.rank:
            raise LocalProtocolError(f"fork {fork_id} of rref {rref_id} belongs to rank {descriptor.owner}")
        self._held(rref_id)
        if descriptor.parent != self.rank:
            return [Send(descriptor.parent, ChildAccept(fork_id))]
        return self._strike(rref_id, fork_id, LocalProtocolError)  # frees nothing: the value is held

    def forks(self, rref_id: RRefId) -> frozenset[ForkId]:
        """Return the recorded forks of a value."""
        return frozenset(self._entry(rref_id, LocalProtocolError).forks)

    def rrefs(self) -> frozenset[RRefId]:
        """Return the values that are alive or expected: after shutdown, the leaks."""
        return frozenset(self._entries)

    def __contains__(self, rref_id: RRefId) -> bool:
        return rref_id in self._entries

    def __repr__(self) -> str:
        return f"<OwnerTable rank={self.rank} {self.stats()}>"

    def stats(self) -> OwnerStats:
        """Count what is in the table."""
        entries = self._entries.values()
        return OwnerStats(
            entries=len(entries),
            expected=sum(not entry.created for entry in entries),
            forks=sum(len(entry.forks) for entry in entries),
            holds=sum(entry.holds for entry in entries),
        )

    def check_invariants(self) -> None:
        """Assert what must be true between any two calls; for tests."""
        for rref_id, entry in self._entries.items():
            assert entry.holds >= 0, f"rref {rref_id} is held {entry.holds} times"
            assert entry.created or rref_id.created_on != self.rank, f"rref {rref_id} is expected from here"

    def _entry(self, rref_id: RRefId, error: type[ProtocolError], where: str = "") -> _Entry:
        entry = self._entries.get(rref_id)
        if entry is None:
            raise error(f"unknown rref {rref_id}{where}")
        return entry

    def _mention(self, rref_id: RRefId, error: type[ProtocolError], where: str = "") -> _Entry:
        """Find an entry, or expect a value whose ``remote`` call, by another worker, is still on its way.

        It cannot be a value that was freed: whoever names it has a living handle or parent (G2).
        """
        if rref_id not in self._entries and rref_id.created_on != self.rank:
            self._entries[rref_id] = _Entry()
        return self._entry(rref_id, error, where)

    def _held(self, rref_id: RRefId) -> _Entry:
        entry = self._entry(rref_id, LocalProtocolError)
        if not entry.holds:
            raise LocalProtocolError(f"rref {rref_id} has no owner reference")
        return entry

    def _record(
        self, entry: _Entry, rref_id: RRefId, fork_id: ForkId, holder: int, error: type[ProtocolError]
    ) -> None:
        if fork_id in entry.forks:
            raise error(f"fork {fork_id} of rref {rref_id} is recorded already")
        if holder not in self._lost:
            entry.forks[fork_id] = holder

    def _strike(
        self, rref_id: RRefId, fork_id: ForkId, error: type[ProtocolError], source: int | None = None
    ) -> list[Action]:
        entry = self._entries.get(rref_id)
        if entry is None or fork_id not in entry.forks:
            if self._lost:  # it may have gone with a dead worker
                return []
            where = "" if source is None else f" in UserDelete from rank {source}"
            raise error(f"unknown fork {fork_id} of rref {rref_id}{where}")
        del entry.forks[fork_id]
        return self._settle(rref_id, entry)

    def _settle(self, rref_id: RRefId, entry: _Entry) -> list[Action]:
        if not entry.is_free():
            return []
        del self._entries[rref_id]
        return [FreeValue(rref_id)]


# --- user side ---


class HandleState(enum.Enum):
    """Whether the owner has confirmed that it recorded a handle."""

    PENDING = enum.auto()
    CONFIRMED = enum.auto()


@dataclass(frozen=True, slots=True)
class UserStats:
    """What is in a :class:`UserTable`; ``children`` counts those not yet accepted."""

    handles: int
    pending: int
    released: int
    children: int


@dataclass(slots=True)
class _Handle:
    """One user handle; its fork id is the key it is kept under."""

    rref_id: RRefId
    owner: int
    state: HandleState
    parent: int | None = None  # rank to send ChildAccept to; None: made by ``remote``, or came from the owner
    released: bool = False  # the local Python handle is gone
    children: set[ForkId] = field(default_factory=set)  # in: fork; out: ChildAccept, cancel_fork

    def is_done(self) -> bool:
        return self.released and self.state is HandleState.CONFIRMED and not self.children


class UserTable:
    """The handles on worker ``rank`` of values that live on other workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._handles: dict[ForkId, _Handle] = {}  # in: create, adopt; out: UserDelete sent, forget
        self._parents: dict[ForkId, ForkId] = {}  # unaccepted child -> the handle here it was made from
        self._dests: dict[ForkId, int] = {}  # unaccepted child -> where it went; in: note_dest; out: as above
        self._lost: set[int] = set()  # dead workers; lose adds

    def create(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> None:
        """Add the handle that a ``remote`` call makes; pending until :meth:`on_confirmed`."""
        state = HandleState.CONFIRMED if owner in self._lost else HandleState.PENDING
        self._add(fork_id, _Handle(rref_id, owner, state), LocalProtocolError)

    def adopt(self, descriptor: ForkDescriptor) -> list[Action]:
        """Add a handle that arrived in a message; the owner, unless it sent it, is asked to confirm it."""
        rref_id, fork_id, owner = descriptor.rref_id, descriptor.fork_id, descriptor.owner
        if descriptor.parent == owner:
            self._add(fork_id, _Handle(rref_id, owner, HandleState.CONFIRMED), RemoteProtocolError)
            return []
        handle = _Handle(rref_id, owner, HandleState.PENDING, descriptor.parent)
        self._add(fork_id, handle, RemoteProtocolError)
        if owner in self._lost:  # nobody will confirm it
            handle.state = HandleState.CONFIRMED
            return [Send(descriptor.parent, ChildAccept(fork_id))]
        return [Send(owner, ForkRequest(rref_id, fork_id))]

    def on_confirmed(self, fork_id: ForkId) -> list[Action]:
        """Note that the response of the ``remote`` call that made this handle came."""
        handle = self._handle(fork_id, LocalProtocolError)
        if handle.owner in self._lost:
            return []
        if handle.state is not HandleState.PENDING or handle.parent is not None:
            raise LocalProtocolError(f"fork {fork_id} of rref {handle.rref_id} does not wait for a response")
        handle.state = HandleState.CONFIRMED
        return self._settle(fork_id, handle)

    def fork(self, fork_id: ForkId, child: ForkId) -> ForkDescriptor:
        """Make a child to put into a message; this handle, pending or not, stays until it is accepted."""
        handle = self._unreleased(fork_id)
        if child in self._parents:
            raise LocalProtocolError(f"fork {child} of rref {handle.rref_id} exists already")
        handle.children.add(child)
        self._parents[child] = fork_id
        return ForkDescriptor(handle.rref_id, child, handle.owner, self.rank)

    def note_dest(self, child: ForkId, dest: int) -> list[Action]:
        """Note where the message with a child goes; a dead worker will not accept it."""
        if child not in self._parents:
            return []
        self._dests[child] = dest
        return self._part(child) if dest in self._lost else []

    def cancel_fork(self, fork_id: ForkId, child: ForkId) -> list[Action]:
        """Undo :meth:`fork`: the message was never sent."""
        if self._parents.get(child) != fork_id:
            raise LocalProtocolError(f"fork {child} is no child of fork {fork_id}")
        return self._part(child)

    def on_fork_accept(self, source: int, message: ForkAccept) -> list[Action]:
        """Note that the owner has recorded this handle, and let its parent go."""
        fork_id = message.fork_id
        handle = self._handle(fork_id, RemoteProtocolError, f" in ForkAccept from rank {source}")
        if source != handle.owner or handle.state is not HandleState.PENDING or handle.parent is None:
            raise RemoteProtocolError(
                f"fork {fork_id} of rref {handle.rref_id} (owner rank {handle.owner}) got ForkAccept"
                f" from rank {source} while in state {handle.state.name}, parent {handle.parent}"
            )
        handle.state = HandleState.CONFIRMED
        return [Send(handle.parent, ChildAccept(fork_id)), *self._settle(fork_id, handle)]

    def on_child_accept(self, source: int, message: ChildAccept) -> list[Action]:
        """Note that the owner knows this child: it no longer needs its parent."""
        if message.fork_id not in self._parents:
            raise RemoteProtocolError(f"unknown fork {message.fork_id} in ChildAccept from rank {source}")
        return self._part(message.fork_id)

    def release(self, fork_id: ForkId) -> list[Action]:
        """Note that the local handle died; the owner is told once it knows this handle and its children."""
        handle = self._unreleased(fork_id)
        handle.released = True
        return self._settle(fork_id, handle)

    def lose(self, rank: int) -> list[Action]:
        """Wait no more for the word of worker ``rank``: it is dead."""
        self._lost.add(rank)
        actions: list[Action] = []
        for child in [child for child, dest in self._dests.items() if dest == rank]:
            actions += self._part(child)
        for fork_id, handle in list(self._handles.items()):
            if handle.owner != rank or handle.state is HandleState.CONFIRMED:
                continue
            handle.state = HandleState.CONFIRMED
            if handle.parent is not None:
                actions.append(Send(handle.parent, ChildAccept(fork_id)))
            actions += self._settle(fork_id, handle)
        return actions

    def forget(self, fork_id: ForkId) -> None:
        """Undo :meth:`create`: the ``remote`` call was never sent. Nobody else knows of the handle."""
        handle = self._handle(fork_id, LocalProtocolError)
        known = handle.state is not HandleState.PENDING and handle.owner not in self._lost
        if known or handle.parent is not None or handle.children:
            raise LocalProtocolError(f"fork {fork_id} of rref {handle.rref_id} is known to others")
        del self._handles[fork_id]

    def is_confirmed(self, fork_id: ForkId) -> bool:
        """Tell whether the owner has confirmed this handle."""
        return self._handle(fork_id, LocalProtocolError).state is HandleState.CONFIRMED

    def parent_of(self, child: ForkId) -> ForkId:
        """Return the handle here from which an unaccepted child was made."""
        if child not in self._parents:
            raise LocalProtocolError(f"unknown child {child}")
        return self._parents[child]

    def is_held(self, fork_id: ForkId) -> bool:
        """Tell whether local code still has this handle."""
        return fork_id in self._handles and not self._handles[fork_id].released

    def unreleased(self) -> frozenset[ForkId]:
        """Return the handles that local code still has."""
        return frozenset(fork_id for fork_id, handle in self._handles.items() if not handle.released)

    def pending(self) -> int:
        """Count the handles and children that wait for a confirmation: 0 when this side is quiescent."""
        stats = self.stats()
        return stats.pending + stats.children

    def __contains__(self, fork_id: ForkId) -> bool:
        return fork_id in self._handles

    def __repr__(self) -> str:
        return f"<UserTable rank={self.rank} {self.stats()}>"

    def stats(self) -> UserStats:
        """Count what is in the table."""
        handles = self._handles.values()
        return UserStats(
            handles=len(handles),
            pending=sum(handle.state is HandleState.PENDING for handle in handles),
            released=sum(handle.released for handle in handles),
            children=len(self._parents),
        )

    def check_invariants(self) -> None:
        """Assert what must be true between any two calls; for tests."""
        children = {child: fork_id for fork_id, handle in self._handles.items() for child in handle.children}
        assert children == self._parents, "children and parents disagree"
        for fork_id, handle in self._handles.items():
            assert handle.owner != self.rank, f"fork {fork_id} is a user handle at its owner"
            assert not handle.is_done(), f"fork {fork_id} should be gone"

    def _add(self, fork_id: ForkId, handle: _Handle, error: type[ProtocolError]) -> None:
        if handle.owner == self.rank:
            raise LocalProtocolError(f"rref {handle.rref_id} lives here: fork {fork_id} is no user handle")
        if fork_id in self._handles:
            raise error(f"fork {fork_id} of rref {handle.rref_id} exists already")
        self._handles[fork_id] = handle

    def _handle(self, fork_id: ForkId, error: type[ProtocolError], where: str = "") -> _Handle:
        handle = self._handles.get(fork_id)
        if handle is None:
            raise error(f"unknown fork {fork_id}{where}")
        return handle

    def _unreleased(self, fork_id: ForkId) -> _Handle:
        handle = self._handle(fork_id, LocalProtocolError)
        if handle.released:
            raise LocalProtocolError(f"fork {fork_id} of rref {handle.rref_id} is released already")
        return handle

    def _part(self, child: ForkId) -> list[Action]:
        fork_id = self._parents.pop(child)
        self._dests.pop(child, None)
        handle = self._handles[fork_id]
        handle.children.remove(child)
        return self._settle(fork_id, handle)

    def _settle(self, fork_id: ForkId, handle: _Handle) -> list[Action]:
        if not handle.is_done():
            return []
        del self._handles[fork_id]
        return [Send(handle.owner, UserDelete(handle.rref_id, fork_id))]
