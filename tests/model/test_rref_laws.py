"""The lifetime laws of RRefs, under random use and random message order (G1, G2 in docs/design/rref.md).

Hypothesis drives four workers made of the two protocol tables each. All messages lie in one bag and are taken
out in any order. After every step:

    law 1  no value is freed while a handle of it lives: a local one, or one in a message on its way;
    law 2  no value is freed twice;
    law 3  when the bag is empty, nothing waits for a confirmation, and a value without handles is gone;
    law 4  a copy of a message is refused and changes nothing (except a late copy of a ForkRequest);
    law 5  a shutdown, at any time, leaves no fork of any value: all is delivered, then user handles are
    released.

At the end all is delivered and dropped: the tables are empty. The environment variable
``MPIRPC_MODEL_EXAMPLES`` sets the number of runs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpirpc._core.messages import (
    ChildAccept,
    ForkAccept,
    ForkDescriptor,
    ForkId,
    ForkRequest,
    RRefId,
    UserDelete,
)
from mpirpc._core.rref_protocol import Action, FreeValue, OwnerTable, Send, UserTable
from mpirpc.errors import ProtocolError

NUM_WORKERS = 4
RANKS = st.integers(0, NUM_WORKERS - 1)
PICK = st.integers(0, 2**16)
"""Picks an element of a list, modulo its length."""


@dataclass(frozen=True)
class Handle:
    """A live Python handle; ``fork_id`` is None for one at the owner."""

    rank: int
    rref_id: RRefId
    fork_id: ForkId | None


@dataclass(frozen=True)
class Draft:
    """A message with a handle in it that is not sent yet, made from ``parent``."""

    parent: Handle
    dest: int
    fork: ForkDescriptor


@dataclass(frozen=True)
class Carry:
    """On its way: a call or a response with a handle in it."""

    dest: int
    fork: ForkDescriptor


@dataclass(frozen=True)
class Remote:
    """On its way: a ``remote`` call."""

    source: int
    dest: int
    rref_id: RRefId
    fork_id: ForkId


@dataclass(frozen=True)
class Response:
    """On its way: the response to a ``remote`` call."""

    dest: int
    fork_id: ForkId


@dataclass(frozen=True)
class Control:
    """On its way: a message of the protocol itself."""

    source: int
    action: Send


class Cluster:
    """Four workers, the network between them, and what a know-all sees of both."""

    def __init__(self) -> None:
        self.owners = [OwnerTable(rank) for rank in range(NUM_WORKERS)]
        self.users = [UserTable(rank) for rank in range(NUM_WORKERS)]
        self.bag: list[Carry | Remote | Response | Control] = []
        self.drafts: list[Draft] = []
        self.handles: list[Handle] = []
        self.owner_of: dict[RRefId, int] = {}
        self.created: set[RRefId] = set()
        self.freed: set[RRefId] = set()
        self.delivered: list[Control] = []  # but no ForkRequest: the owner does not remember deleted forks
        self._local_ids = itertools.count(1)

    # -- what user code does --

    def make_local(self, rank: int) -> None:
        rref_id = RRefId(rank, next(self._local_ids))
        self.owner_of[rref_id] = rank
        self.created.add(rref_id)
        self.owners[rank].create(rref_id)
        self.hold(rank, rref_id)

    def make_remote(self, rank: int, dest: int) -> None:
        rref_id, fork_id = RRefId(rank, next(self._local_ids)), ForkId(rank, next(self._local_ids))
        self.owner_of[rref_id] = dest
        self.users[rank].create(rref_id, fork_id, dest)
        self.handles.append(Handle(rank, rref_id, fork_id))
        self.bag.append(Remote(rank, dest, rref_id, fork_id))

    def fail_to_send_remote(self, rank: int, dest: int) -> None:
        fork_id = ForkId(rank, next(self._local_ids))
        self.users[rank].create(RRefId(rank, next(self._local_ids)), fork_id, dest)
        self.users[rank].forget(fork_id)

    def share(self, parent: Handle, dest: int) -> None:
        child, rank = ForkId(parent.rank, next(self._local_ids)), parent.rank
        if parent.fork_id is None:
            self.owners[rank].add_fork(parent.rref_id, child)
            fork = ForkDescriptor(parent.rref_id, child, owner=rank, parent=rank)
        else:
            fork = self.users[rank].fork(parent.fork_id, child)
        self.drafts.append(Draft(parent, dest, fork))

    def send(self, draft: Draft) -> None:
        self.drafts.remove(draft)
        self.bag.append(Carry(draft.dest, draft.fork))

    def cancel(self, draft: Draft) -> None:
        self.drafts.remove(draft)
        rank, child = draft.parent.rank, draft.fork.fork_id
        if draft.parent.fork_id is None:
            self.act(rank, self.owners[rank].cancel_fork(draft.fork.rref_id, child))
        else:
            self.act(rank, self.users[rank].cancel_fork(draft.parent.fork_id, child))

    def drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        if handle.fork_id is None:
            self.act(handle.rank, self.owners[handle.rank].drop(handle.rref_id))
        else:
            self.act(handle.rank, self.users[handle.rank].release(handle.fork_id))

    def shut_down(self, picks: Sequence[int]) -> None:
        """What a graceful shutdown does with handles that user code still holds; owner handles stay."""
        turns = itertools.cycle(picks)
        while self.drafts:
            self.send(self.drafts[0])
        while self.bag:
            self.deliver(next(turns))
        while users := [handle for handle in self.handles if handle.fork_id is not None]:
            turn = next(turns)
            if self.bag and turn % 2:
                self.deliver(turn)
            else:
                self.drop(users[turn % len(users)])
        while self.bag:
            self.deliver(next(turns))
        for owner in self.owners:
            assert not any(owner.forks(rref_id) for rref_id in owner.rrefs()), "law 5"

    # -- what the network does --

    def deliver(self, index: int) -> None:
        match self.bag.pop(index % len(self.bag)):
            case Carry(dest, fork):
                self.receive_handle(dest, fork)
            case Remote(source, dest, rref_id, fork_id):
                self.created.add(rref_id)
                self.owners[dest].create(rref_id, fork_id)
                self.bag.append(Response(source, fork_id))
            case Response(dest, fork_id):
                self.act(dest, self.users[dest].on_confirmed(fork_id))
            case Control(source, action):
                self.act(action.dest, self.handle_control(source, action))
                self.deliver_copy(source, action)
                if not isinstance(action.message, ForkRequest):
                    self.delivered.append(Control(source, action))

    def receive_handle(self, rank: int, fork: ForkDescriptor) -> None:
        if fork.owner == rank:
            self.hold(rank, fork.rref_id)
            self.act(rank, self.owners[rank].came_home(fork))
        else:
            self.handles.append(Handle(rank, fork.rref_id, fork.fork_id))
            self.act(rank, self.users[rank].adopt(fork))

    def handle_control(self, source: int, action: Send) -> list[Action]:
        owner, user = self.owners[action.dest], self.users[action.dest]
        match action.message:
            case ForkRequest() as message:
                return owner.on_fork_request(source, message)
            case UserDelete() as message:
                return owner.on_user_delete(source, message)
            case ForkAccept() as message:
                return user.on_fork_accept(source, message)
            case ChildAccept() as message:
                return user.on_child_accept(source, message)

    def deliver_copy(self, source: int, action: Send) -> None:
        before = self.owners[action.dest].stats(), self.users[action.dest].stats()
        with pytest.raises(ProtocolError):
            self.handle_control(source, action)
        assert (self.owners[action.dest].stats(), self.users[action.dest].stats()) == before, "law 4"

    def act(self, rank: int, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.bag.append(Control(rank, action))
                case FreeValue(rref_id):
                    assert self.owner_of[rref_id] == rank
                    assert rref_id in self.created
                    assert rref_id not in self.freed, "law 2"
                    self.freed.add(rref_id)

    def hold(self, rank: int, rref_id: RRefId) -> None:
        self.owners[rank].hold(rref_id)
        self.handles.append(Handle(rank, rref_id, None))

    # -- what the know-all sees --

    def alive(self) -> set[RRefId]:
        """Return the values that somebody has, or will have, a handle of."""
        on_the_way = (message.fork.rref_id for message in self.bag if isinstance(message, Carry))
        drafted = (draft.fork.rref_id for draft in self.drafts)
        return {handle.rref_id for handle in self.handles} | set(on_the_way) | set(drafted)

    def is_quiet(self) -> bool:
        return not self.bag and not self.drafts


class RRefLaws(RuleBasedStateMachine):
    """Random use of the cluster; the laws are its invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.last_picks: list[int] = [0]

    @initialize(picks=st.lists(PICK, min_size=1, max_size=8))
    def choose_the_last_order(self, picks: list[int]) -> None:
        self.last_picks = picks

    @rule(rank=RANKS)
    def make_local(self, rank: int) -> None:
        self.cluster.make_local(rank)

    @rule(rank=RANKS, distance=st.integers(1, NUM_WORKERS - 1))
    def make_remote(self, rank: int, distance: int) -> None:
        self.cluster.make_remote(rank, (rank + distance) % NUM_WORKERS)

    @rule(rank=RANKS, distance=st.integers(1, NUM_WORKERS - 1))
    def fail_to_send_remote(self, rank: int, distance: int) -> None:
        self.cluster.fail_to_send_remote(rank, (rank + distance) % NUM_WORKERS)

    @precondition(lambda self: self.cluster.handles)
    @rule(pick=PICK, dest=RANKS, at_once=st.booleans())
    def share(self, pick: int, dest: int, at_once: bool) -> None:
        """All four cases and the self-call: the handle may be an owner's or a user's, and so may ``dest``."""
        self.cluster.share(self.cluster.handles[pick % len(self.cluster.handles)], dest)
        if at_once:
            self.cluster.send(self.cluster.drafts[-1])

    @precondition(lambda self: self.cluster.drafts)
    @rule(pick=PICK)
    def send(self, pick: int) -> None:
        self.cluster.send(self.cluster.drafts[pick % len(self.cluster.drafts)])

    @precondition(lambda self: self.cluster.drafts)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        self.cluster.cancel(self.cluster.drafts[pick % len(self.cluster.drafts)])

    @precondition(lambda self: self.cluster.handles)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        self.cluster.drop(self.cluster.handles[pick % len(self.cluster.handles)])

    @precondition(lambda self: self.cluster.bag)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def deliver(self, picks: list[int]) -> None:
        for pick in picks[: len(self.cluster.bag)]:
            self.cluster.deliver(pick)

    @precondition(lambda self: self.cluster.delivered)
    @rule(pick=PICK)
    def deliver_late_copy(self, pick: int) -> None:
        copy = self.cluster.delivered[pick % len(self.cluster.delivered)]
        self.cluster.deliver_copy(copy.source, copy.action)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def shut_down(self, picks: list[int]) -> None:
        self.cluster.shut_down(picks)

    @invariant()
    def no_value_is_freed_while_a_handle_lives(self) -> None:
        cluster = self.cluster
        assert not cluster.alive() & cluster.freed, "law 1"
        for rref_id in cluster.created - cluster.freed:
            assert rref_id in cluster.owners[cluster.owner_of[rref_id]]

    @invariant()
    def nothing_waits_in_a_quiet_cluster(self) -> None:
        if self.cluster.is_quiet():
            assert all(user.pending() == 0 for user in self.cluster.users), "law 3"
            assert self.cluster.created - self.cluster.freed == self.cluster.alive(), "law 3"

    @invariant()
    def tables_agree_with_themselves_and_with_the_handles(self) -> None:
        for rank in range(NUM_WORKERS):
            self.cluster.owners[rank].check_invariants()
            self.cluster.users[rank].check_invariants()
            here = [handle for handle in self.cluster.handles if handle.rank == rank]
            user_handles = {handle.fork_id for handle in here if handle.fork_id is not None}
            assert self.cluster.users[rank].unreleased() == user_handles
            assert self.cluster.owners[rank].stats().holds == len(here) - len(user_handles)

    def teardown(self) -> None:
        """Deliver and drop everything, mixed: each value is freed once and no table remembers it."""
        cluster = self.cluster
        for pick in itertools.cycle(self.last_picks):
            if cluster.drafts:
                cluster.send(cluster.drafts[0])
            elif cluster.handles and (pick % 3 == 0 or not cluster.bag):
                cluster.drop(cluster.handles[pick % len(cluster.handles)])
            elif cluster.bag:
                cluster.deliver(pick)
            else:
                break
            self.no_value_is_freed_while_a_handle_lives()
        assert cluster.freed == set(cluster.owner_of)
        assert all(owner.stats().entries == 0 for owner in cluster.owners)
        assert all(user.stats().handles == 0 and user.pending() == 0 for user in cluster.users)


TestRRefLaws = RRefLaws.TestCase
TestRRefLaws.settings = settings(
    max_examples=int(os.environ.get("MPIRPC_MODEL_EXAMPLES", "200")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
