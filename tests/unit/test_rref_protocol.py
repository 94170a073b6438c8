"""Unit tests for mpirpc._core.rref_protocol (guarantees G1, G2 in docs/design/rref.md)."""

from collections.abc import Callable, Iterator

import pytest

from mpirpc._core.messages import (
    ChildAccept,
    ForkAccept,
    ForkDescriptor,
    ForkId,
    ForkRequest,
    RRefId,
    UserDelete,
)
from mpirpc._core.rref_protocol import FreeValue, OwnerStats, OwnerTable, Send, UserStats, UserTable
from mpirpc.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from tests.unit.ids import CREATOR, FORK_A, FORK_Y, FORK_Z, LOCAL_RREF, OTHER, OWNER, OWNER_FORK, RREF, THIRD

A_FROM_OWNER = ForkDescriptor(RREF, OWNER_FORK, owner=OWNER, parent=OWNER)
Y_FROM_CREATOR = ForkDescriptor(RREF, FORK_Y, owner=OWNER, parent=CREATOR)


@pytest.fixture
def owner() -> Iterator[OwnerTable]:
    """Yield an owner that knows one handle: A's."""
    table = OwnerTable(OWNER)
    table.create(RREF, first_fork=FORK_A)
    yield table
    table.check_invariants()


@pytest.fixture
def empty_owner() -> Iterator[OwnerTable]:
    """Yield an owner that knows nothing yet."""
    table = OwnerTable(OWNER)
    yield table
    table.check_invariants()


@pytest.fixture
def creator() -> Iterator[UserTable]:
    """Yield the worker that called ``remote``; its handle A is pending."""
    table = UserTable(CREATOR)
    table.create(RREF, FORK_A, OWNER)
    yield table
    table.check_invariants()


@pytest.fixture
def other() -> Iterator[UserTable]:
    """Yield a user that adopted Y from the creator; Y is pending."""
    table = UserTable(OTHER)
    assert table.adopt(Y_FROM_CREATOR) == [Send(OWNER, ForkRequest(RREF, FORK_Y))]
    yield table
    table.check_invariants()


# --- G1: the owner learns of every deletion ---


def test_value_is_freed_when_the_last_fork_is_deleted(owner: OwnerTable) -> None:
    assert owner.on_user_delete(CREATOR, UserDelete(RREF, FORK_A)) == [FreeValue(RREF)]
    assert RREF not in owner


def test_value_is_freed_when_the_last_owner_reference_is_dropped(empty_owner: OwnerTable) -> None:
    empty_owner.create(LOCAL_RREF)
    empty_owner.hold(LOCAL_RREF)
    empty_owner.hold(LOCAL_RREF)
    assert empty_owner.drop(LOCAL_RREF) == []
    assert empty_owner.drop(LOCAL_RREF) == [FreeValue(LOCAL_RREF)]


def test_new_value_waits_for_its_first_reference(empty_owner: OwnerTable) -> None:
    empty_owner.create(LOCAL_RREF)
    assert LOCAL_RREF in empty_owner
    assert empty_owner.forks(LOCAL_RREF) == frozenset()


def test_owner_reference_and_fork_each_keep_the_value(owner: OwnerTable) -> None:
    owner.hold(RREF)
    assert owner.on_user_delete(CREATOR, UserDelete(RREF, FORK_A)) == []
    owner.add_fork(RREF, OWNER_FORK)
    assert owner.drop(RREF) == []
    assert owner.on_user_delete(OTHER, UserDelete(RREF, OWNER_FORK)) == [FreeValue(RREF)]


def test_cancelled_fork_frees_the_value_if_it_was_the_last(empty_owner: OwnerTable) -> None:
    """The owner drops its handle after pickling it, then the send fails."""
    empty_owner.create(LOCAL_RREF)
    empty_owner.hold(LOCAL_RREF)
    empty_owner.add_fork(LOCAL_RREF, OWNER_FORK)
    assert empty_owner.drop(LOCAL_RREF) == []
    assert empty_owner.cancel_fork(LOCAL_RREF, OWNER_FORK) == [FreeValue(LOCAL_RREF)]


def test_confirmed_handle_tells_the_owner_when_it_is_released(creator: UserTable) -> None:
    assert not creator.is_confirmed(FORK_A)
    assert creator.on_confirmed(FORK_A) == []
    assert creator.is_confirmed(FORK_A)
    assert creator.release(FORK_A) == [Send(OWNER, UserDelete(RREF, FORK_A))]
    assert FORK_A not in creator


def test_handle_from_its_owner_is_confirmed_at_once() -> None:
    user = UserTable(OTHER)
    assert user.adopt(A_FROM_OWNER) == []
    assert user.is_confirmed(OWNER_FORK)
    assert user.release(OWNER_FORK) == [Send(OWNER, UserDelete(RREF, OWNER_FORK))]


def test_pending_handle_of_a_remote_call_deletes_itself_after_the_response(creator: UserTable) -> None:
    """Sooner, the delete could reach the owner before the call that makes the value."""
    assert creator.release(FORK_A) == []
    assert creator.on_confirmed(FORK_A) == [Send(OWNER, UserDelete(RREF, FORK_A))]


def test_pending_child_deletes_itself_after_the_accept(other: UserTable) -> None:
    """Sooner, the delete could overtake the fork request, which would then keep the value for ever."""
    assert other.release(FORK_Y) == []
    assert other.on_fork_accept(OWNER, ForkAccept(FORK_Y)) == [
        Send(CREATOR, ChildAccept(FORK_Y)),
        Send(OWNER, UserDelete(RREF, FORK_Y)),
    ]
    assert FORK_Y not in other


# --- G2: a parent outlives its unconfirmed child ---


def test_owner_records_a_fork_before_it_accepts_it(owner: OwnerTable) -> None:
    assert owner.on_fork_request(OTHER, ForkRequest(RREF, FORK_Y)) == [Send(OTHER, ForkAccept(FORK_Y))]
    assert owner.forks(RREF) == {FORK_A, FORK_Y}


def test_accepted_child_tells_its_parent(other: UserTable) -> None:
    assert other.on_fork_accept(OWNER, ForkAccept(FORK_Y)) == [Send(CREATOR, ChildAccept(FORK_Y))]
    assert other.is_confirmed(FORK_Y)


def test_parent_waits_for_every_child(creator: UserTable) -> None:
    creator.on_confirmed(FORK_A)
    assert creator.fork(FORK_A, FORK_Y) == Y_FROM_CREATOR
    creator.fork(FORK_A, FORK_Z)
    assert creator.release(FORK_A) == []
    assert creator.on_child_accept(OTHER, ChildAccept(FORK_Z)) == []
    assert creator.on_child_accept(OTHER, ChildAccept(FORK_Y)) == [Send(OWNER, UserDelete(RREF, FORK_A))]


def test_pending_parent_may_fork_and_waits_for_both(creator: UserTable) -> None:
    """The child's accept may come before the parent's own response."""
    creator.fork(FORK_A, FORK_Y)
    assert creator.release(FORK_A) == []
    assert creator.on_child_accept(OTHER, ChildAccept(FORK_Y)) == []
    assert creator.on_confirmed(FORK_A) == [Send(OWNER, UserDelete(RREF, FORK_A))]


def test_cancelled_child_lets_its_parent_go(creator: UserTable) -> None:
    creator.on_confirmed(FORK_A)
    creator.fork(FORK_A, FORK_Y)
    assert creator.release(FORK_A) == []
    assert creator.cancel_fork(FORK_A, FORK_Y) == [Send(OWNER, UserDelete(RREF, FORK_A))]


def test_grandchild_may_come_and_go_before_its_parent_is_known(owner: OwnerTable) -> None:
    """Z's request and delete overtake Y's request; A, which waits for Y, keeps the value alive.

    Real case: Y forwards its handle at once and its own ForkRequest is slow (torch RRef note, "A -> Y -> Z").
    """
    assert owner.on_fork_request(THIRD, ForkRequest(RREF, FORK_Z)) == [Send(THIRD, ForkAccept(FORK_Z))]
    assert owner.on_user_delete(THIRD, UserDelete(RREF, FORK_Z)) == []
    assert owner.on_fork_request(OTHER, ForkRequest(RREF, FORK_Y)) == [Send(OTHER, ForkAccept(FORK_Y))]
    assert owner.forks(RREF) == {FORK_A, FORK_Y}


def test_handle_sent_to_its_own_worker_is_a_child_like_any_other(creator: UserTable) -> None:
    """A self-call passes A's handle: parent and child live in one table."""
    creator.on_confirmed(FORK_A)
    assert creator.adopt(creator.fork(FORK_A, FORK_Y)) == [Send(OWNER, ForkRequest(RREF, FORK_Y))]
    assert creator.release(FORK_A) == []
    assert creator.on_fork_accept(OWNER, ForkAccept(FORK_Y)) == [Send(CREATOR, ChildAccept(FORK_Y))]
    assert creator.on_child_accept(CREATOR, ChildAccept(FORK_Y)) == [Send(OWNER, UserDelete(RREF, FORK_A))]
    assert creator.unreleased() == {FORK_Y}


# --- handles that come home ---


def test_handle_that_comes_home_lets_its_parent_go(owner: OwnerTable) -> None:
    owner.hold(RREF)
    assert owner.came_home(Y_FROM_CREATOR) == [Send(CREATOR, ChildAccept(FORK_Y))]
    assert owner.forks(RREF) == {FORK_A}


def test_handle_that_the_owner_sent_to_itself_leaves_no_fork(owner: OwnerTable) -> None:
    owner.add_fork(RREF, OWNER_FORK)
    owner.hold(RREF)
    assert owner.came_home(A_FROM_OWNER) == []
    assert owner.forks(RREF) == {FORK_A}


# --- messages that overtake the `remote` call ---


def test_fork_request_may_overtake_the_remote_call(empty_owner: OwnerTable) -> None:
    """The caller of ``remote`` passes its pending handle on; the child's request and delete arrive first."""
    empty_owner.on_fork_request(OTHER, ForkRequest(RREF, FORK_Y))
    assert empty_owner.on_user_delete(OTHER, UserDelete(RREF, FORK_Y)) == []
    assert empty_owner.stats() == OwnerStats(entries=1, expected=1, forks=0, holds=0)
    empty_owner.create(RREF, FORK_A)
    assert empty_owner.on_user_delete(CREATOR, UserDelete(RREF, FORK_A)) == [FreeValue(RREF)]


def test_handle_may_come_home_before_the_remote_call(empty_owner: OwnerTable) -> None:
    """``r = remote("owner", f); rpc_sync("owner", g, (r,))`` and the second message is processed first."""
    empty_owner.hold(RREF)
    assert empty_owner.came_home(Y_FROM_CREATOR) == [Send(CREATOR, ChildAccept(FORK_Y))]
    assert empty_owner.drop(RREF) == []
    empty_owner.create(RREF, FORK_A)
    assert empty_owner.forks(RREF) == {FORK_A}


# --- a `remote` call that was never sent ---


def test_forgotten_handle_vanishes_without_a_message(creator: UserTable) -> None:
    creator.forget(FORK_A)
    assert FORK_A not in creator
    assert creator.stats() == UserStats(handles=0, pending=0, released=0, children=0)


# --- what the store asks ---


def test_pending_counts_handles_and_children(creator: UserTable) -> None:
    creator.fork(FORK_A, FORK_Y)
    assert creator.pending() == 2
    assert creator.stats() == UserStats(handles=1, pending=1, released=0, children=1)
    creator.on_confirmed(FORK_A)
    creator.on_child_accept(OTHER, ChildAccept(FORK_Y))
    assert creator.pending() == 0
    assert creator.unreleased() == {FORK_A}


def test_child_leads_to_its_parent(creator: UserTable) -> None:
    creator.fork(FORK_A, FORK_Y)
    assert creator.parent_of(FORK_Y) == FORK_A


def test_handle_is_held_until_it_is_released(creator: UserTable) -> None:
    assert creator.is_held(FORK_A)
    creator.release(FORK_A)
    assert not creator.is_held(FORK_A)
    assert not creator.is_held(FORK_Y)


def test_reports_count_what_is_there(owner: OwnerTable, creator: UserTable) -> None:
    owner.hold(RREF)
    assert owner.stats() == OwnerStats(entries=1, expected=0, forks=1, holds=1)
    assert owner.rrefs() == {RREF}
    assert repr(owner) == "<OwnerTable rank=0 OwnerStats(entries=1, expected=0, forks=1, holds=1)>"
    assert repr(creator) == "<UserTable rank=1 UserStats(handles=1, pending=1, released=0, children=0)>"


# --- refusals ---

UNKNOWN = RRefId(THIRD, 9)
NOWHERE = ForkId(THIRD, 9)

OWNER_REFUSALS: dict[str, tuple[Callable[[OwnerTable], object], type[ProtocolError], str]] = {
    "second remote call": (
        lambda t: t.create(RREF, FORK_A),
        RemoteProtocolError,
        r"rref 1\.1 exists already",
    ),
    "second local value": (lambda t: t.create(RREF), LocalProtocolError, r"rref 1\.1 exists already"),
    "hold of an unknown local value": (
        lambda t: t.hold(LOCAL_RREF),
        LocalProtocolError,
        r"unknown rref 0\.1",
    ),
    "drop of an unknown value": (lambda t: t.drop(UNKNOWN), LocalProtocolError, r"unknown rref 3\.9"),
    "drop without a hold": (lambda t: t.drop(RREF), LocalProtocolError, r"rref 1\.1 has no owner reference"),
    "fork of an unknown value": (
        lambda t: t.add_fork(UNKNOWN, OWNER_FORK),
        LocalProtocolError,
        r"unknown rref 3\.9",
    ),
    "fork recorded twice": (
        lambda t: t.add_fork(RREF, FORK_A),
        LocalProtocolError,
        r"fork 1\.2 of rref 1\.1 is recorded already",
    ),
    "cancel of an unknown fork": (
        lambda t: t.cancel_fork(RREF, FORK_Y),
        LocalProtocolError,
        r"unknown fork 1\.3 of rref 1\.1",
    ),
    "request for a value that was freed or never was": (
        lambda t: t.on_fork_request(OTHER, ForkRequest(LOCAL_RREF, FORK_Y)),
        RemoteProtocolError,
        r"unknown rref 0\.1, asked for by fork 1\.3 from rank 2",
    ),
    "doubled request": (
        lambda t: t.on_fork_request(CREATOR, ForkRequest(RREF, FORK_A)),
        RemoteProtocolError,
        r"fork 1\.2 of rref 1\.1 is recorded already",
    ),
    "delete of an unknown fork": (
        lambda t: t.on_user_delete(OTHER, UserDelete(RREF, FORK_Z)),
        RemoteProtocolError,
        r"unknown fork 2\.1 of rref 1\.1 in UserDelete from rank 2",
    ),
    "delete for an unknown value": (
        lambda t: t.on_user_delete(OTHER, UserDelete(UNKNOWN, FORK_Z)),
        RemoteProtocolError,
        r"unknown fork 2\.1 of rref 3\.9",
    ),
    "home of another worker": (
        lambda t: t.came_home(ForkDescriptor(RREF, FORK_Y, owner=THIRD, parent=CREATOR)),
        LocalProtocolError,
        r"fork 1\.3 of rref 1\.1 belongs to rank 3",
    ),
    "home without a hold": (
        lambda t: t.came_home(Y_FROM_CREATOR),
        LocalProtocolError,
        r"rref 1\.1 has no owner reference",
    ),
    "forks of an unknown value": (lambda t: t.forks(UNKNOWN), LocalProtocolError, r"unknown rref 3\.9"),
}


@pytest.mark.parametrize(("attempt", "error", "text"), OWNER_REFUSALS.values(), ids=OWNER_REFUSALS)
def test_owner_refuses_and_changes_nothing(
    owner: OwnerTable, attempt: Callable[[OwnerTable], object], error: type[ProtocolError], text: str
) -> None:
    before = owner.stats(), owner.forks(RREF)
    with pytest.raises(error, match=text):
        attempt(owner)
    assert (owner.stats(), owner.forks(RREF)) == before


def test_remote_call_with_a_fork_that_is_taken_is_refused(empty_owner: OwnerTable) -> None:
    empty_owner.on_fork_request(OTHER, ForkRequest(RREF, FORK_Y))
    with pytest.raises(RemoteProtocolError, match=r"fork 1\.3 of rref 1\.1 is recorded already"):
        empty_owner.create(RREF, FORK_Y)
    assert empty_owner.stats() == OwnerStats(entries=1, expected=1, forks=1, holds=0)


USER_REFUSALS: dict[str, tuple[Callable[[UserTable], object], type[ProtocolError], str]] = {
    "handle made twice": (
        lambda t: t.create(RREF, FORK_Y, OWNER),
        LocalProtocolError,
        r"fork 1\.3 of rref 1\.1 exists already",
    ),
    "user handle of a local value": (
        lambda t: t.create(RREF, FORK_Z, OTHER),
        LocalProtocolError,
        r"rref 1\.1 lives here: fork 2\.1 is no user handle",
    ),
    "handle adopted twice": (
        lambda t: t.adopt(Y_FROM_CREATOR),
        RemoteProtocolError,
        r"fork 1\.3 of rref 1\.1 exists already",
    ),
    "handle adopted at its owner": (
        lambda t: t.adopt(ForkDescriptor(RREF, FORK_Z, owner=OTHER, parent=CREATOR)),
        LocalProtocolError,
        r"rref 1\.1 lives here",
    ),
    "response for an adopted handle": (
        lambda t: t.on_confirmed(FORK_Y),
        LocalProtocolError,
        r"fork 1\.3 of rref 1\.1 does not wait for a response",
    ),
    "response for an unknown handle": (
        lambda t: t.on_confirmed(NOWHERE),
        LocalProtocolError,
        r"unknown fork 3\.9",
    ),
    "child made twice": (
        lambda t: t.fork(FORK_Y, FORK_Z),
        LocalProtocolError,
        r"fork 2\.1 of rref 1\.1 exists already",
    ),
    "child of an unknown handle": (
        lambda t: t.fork(NOWHERE, ForkId(OTHER, 7)),
        LocalProtocolError,
        r"unknown fork 3\.9",
    ),
    "cancel of another's child": (
        lambda t: t.cancel_fork(FORK_A, FORK_Z),
        LocalProtocolError,
        r"fork 2\.1 is no child of fork 1\.2",
    ),
    "parent of an unknown child": (lambda t: t.parent_of(NOWHERE), LocalProtocolError, r"unknown child 3\.9"),
    "accept for an unknown handle": (
        lambda t: t.on_fork_accept(OWNER, ForkAccept(NOWHERE)),
        RemoteProtocolError,
        r"unknown fork 3\.9 in ForkAccept from rank 0",
    ),
    "accept by a stranger": (
        lambda t: t.on_fork_accept(THIRD, ForkAccept(FORK_Y)),
        RemoteProtocolError,
        r"fork 1\.3 of rref 1\.1 \(owner rank 0\) got ForkAccept from rank 3 while in state PENDING",
    ),
    "accept of a confirmed handle": (
        lambda t: t.on_fork_accept(OWNER, ForkAccept(OWNER_FORK)),
        RemoteProtocolError,
        r"fork 0\.2 .* got ForkAccept from rank 0 while in state CONFIRMED",
    ),
    "accept of a handle that waits for its response": (
        lambda t: t.on_fork_accept(OWNER, ForkAccept(ForkId(OTHER, 5))),
        RemoteProtocolError,
        r"fork 2\.5 .* got ForkAccept from rank 0 while in state PENDING, parent None",
    ),
    "accept of an unknown child": (
        lambda t: t.on_child_accept(THIRD, ChildAccept(NOWHERE)),
        RemoteProtocolError,
        r"unknown fork 3\.9 in ChildAccept from rank 3",
    ),
    "release of an unknown handle": (lambda t: t.release(NOWHERE), LocalProtocolError, r"unknown fork 3\.9"),
    "handle released twice": (
        lambda t: t.release(ForkId(OTHER, 5)),
        LocalProtocolError,
        r"fork 2\.5 of rref 1\.1 is released already",
    ),
    "child of a released handle": (
        lambda t: t.fork(ForkId(OTHER, 5), NOWHERE),
        LocalProtocolError,
        r"fork 2\.5 of rref 1\.1 is released already",
    ),
    "adopted handle forgotten": (
        lambda t: t.forget(FORK_Y),
        LocalProtocolError,
        r"fork 1\.3 of rref 1\.1 is known to others",
    ),
    "confirmed handle forgotten": (
        lambda t: t.forget(OWNER_FORK),
        LocalProtocolError,
        r"fork 0\.2 of rref 1\.1 is known to others",
    ),
    "state of an unknown handle": (
        lambda t: t.is_confirmed(NOWHERE),
        LocalProtocolError,
        r"unknown fork 3\.9",
    ),
}


@pytest.mark.parametrize(("attempt", "error", "text"), USER_REFUSALS.values(), ids=USER_REFUSALS)
def test_user_refuses_and_changes_nothing(
    other: UserTable, attempt: Callable[[UserTable], object], error: type[ProtocolError], text: str
) -> None:
    """The table has every sort of handle: Y pending with a child Z, one from the owner, one released."""
    other.fork(FORK_Y, FORK_Z)
    other.adopt(A_FROM_OWNER)
    other.create(RREF, ForkId(OTHER, 5), OWNER)
    other.release(ForkId(OTHER, 5))
    before = other.stats(), other.unreleased()
    with pytest.raises(error, match=text):
        attempt(other)
    assert (other.stats(), other.unreleased()) == before


def test_handle_with_a_child_cannot_be_forgotten(creator: UserTable) -> None:
    creator.fork(FORK_A, FORK_Y)
    with pytest.raises(LocalProtocolError, match=r"fork 1\.2 of rref 1\.1 is known to others"):
        creator.forget(FORK_A)
    assert creator.pending() == 2
