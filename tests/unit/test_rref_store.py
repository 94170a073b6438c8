"""Unit tests for mpirpc._core.rref_store: values live as long as handles, whatever the order of messages."""

import gc
import weakref

import pytest

import mpirpc as rpc
from mpirpc._core.messages import ForkId, RRefId
from mpirpc._core.rref_store import RRefStats
from mpirpc.testing import LoopbackCluster

KINDS = ["CallRequest", "CallResponse", "ErrorResponse", "FetchRequest"]
KINDS += ["ForkRequest", "ForkAccept", "ChildAccept", "UserDelete"]
"""In the order of their numbers on the wire, which begin at 1."""

NOTHING = RRefStats(owned=0, used=0, forks=0, pending=0)


alive = weakref.WeakSet()
"""The values there are."""


class Value:
    """Something to refer to."""

    def __init__(self):
        alive.add(self)

    def hello(self):
        return "hello"


@pytest.fixture
def cluster():
    with LoopbackCluster(3) as made:
        yield made
        settle(made)
    assert not alive


def settle(cluster):
    """Let messages and chores be done until nothing is left anywhere."""
    for _ in range(3):
        for runtime in cluster.runtimes:
            with cluster.on(runtime.agent.rank):
                for rank in range(3):
                    rpc.rpc_sync(rank, len, args=((),))
    while any(runtime.store.stats() != NOTHING for runtime in cluster.runtimes):
        with cluster.on(0):
            rpc.rpc_sync(1, len, args=((),))
            rpc.rpc_sync(2, len, args=((),))


def stats(cluster, rank):
    return cluster.runtimes[rank].store.stats()


def hold_kinds(cluster, *kinds):
    """Keep messages of these kinds back; the kind is the third byte of a head."""
    numbers = {number for number, kind in enumerate(KINDS, 1) if kind in kinds}
    cluster.network.hold(lambda source, dest, head: head[2] in numbers)


def read(rref):
    return rref.rpc_sync().hello()


def test_own_value_lives_as_long_as_its_handle(cluster):
    with cluster.on(0):
        rref = rpc.RRef(Value())
        assert stats(cluster, 0) == RRefStats(owned=1, used=0, forks=0, pending=0)
        assert len(alive) == 1
        del rref


def test_remote_value_is_counted_on_both_sides(cluster):
    with cluster.on(0):
        rref = rpc.remote("worker1", Value)
        assert rref.rpc_sync().hello() == "hello"
        assert stats(cluster, 0) == RRefStats(owned=0, used=1, forks=0, pending=0)
        assert stats(cluster, 1) == RRefStats(owned=1, used=0, forks=1, pending=0)
        assert len(alive) == 1
        del rref


def test_handle_is_pending_until_the_owner_answers(cluster):
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: source == 1)
        rref = rpc.remote("worker1", Value)
        assert stats(cluster, 0).pending == 1
        assert not rref.confirmed_by_owner()
        cluster.network.release_all()
        assert rref.rpc_sync().hello() == "hello"
        assert rref.confirmed_by_owner()
        del rref


def test_handle_dropped_before_its_call_arrives(cluster):
    with cluster.on(0):
        cluster.network.hold()
        rpc.remote("worker1", Value)
        cluster.network.release_all()


@pytest.mark.parametrize("kind", ["ChildAccept", "UserDelete"])
def test_release_messages_may_be_slow(cluster, kind):
    """User worker0 shares with user worker2, which reads while this kind of message is held back."""
    hold_kinds(cluster, kind)
    with cluster.on(0):
        rref = rpc.remote("worker1", Value)
        assert rpc.rpc_sync("worker2", read, args=(rref,)) == "hello"
        del rref
        assert len(alive) == 1
        cluster.network.release_all()


def is_confirmed(rref):
    return rref.confirmed_by_owner()


@pytest.mark.parametrize("kind", ["ForkRequest", "ForkAccept"])
@pytest.mark.parametrize("mode", [rpc.rpc_async, rpc.remote])
def test_function_runs_once_the_owners_know_the_handles_in_its_arguments(cluster, kind, mode):
    """As in torch. Meanwhile worker2 runs other calls: nothing waits in a thread."""
    hold_kinds(cluster, kind)
    with cluster.on(0):
        first, second = rpc.remote("worker1", Value), rpc.remote("worker1", Value)
        running = mode("worker2", both_confirmed, args=(first, second))
        assert rpc.rpc_sync("worker2", max, args=(1, 2)) == 2
        cluster.network.release_all()
        assert (running.wait() if mode is rpc.rpc_async else running.to_here()) == (True, True)


def both_confirmed(first, second):
    return is_confirmed(first), is_confirmed(second)


def test_parent_outlives_its_unconfirmed_child(cluster):
    """G2: the first handle is dropped while worker2's request to the owner is under way."""
    hold_kinds(cluster, "ForkRequest")
    with cluster.on(0):
        rref = rpc.remote("worker1", Value)
        future = rpc.rpc_async("worker2", read, args=(rref,))
        del rref
        gc.collect()
        assert rpc.rpc_sync("worker1", len, args=((),)) == 0
        assert len(alive) == 1
        cluster.network.release_all()
        assert future.wait() == "hello"


def test_use_before_the_creating_call_arrives(cluster):
    """worker2 asks the owner for a value whose creating call is still on its way."""
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: (source, dest) == (0, 1))
        rref = rpc.remote("worker1", Value)
        future = rpc.rpc_async("worker2", read, args=(rref,))
        assert not future.done()
        cluster.network.release_all()
        assert future.wait() == "hello"
        del rref


def test_leaks_are_described(cluster):
    store = cluster.runtimes[1].store
    with cluster.on(0):
        rref = rpc.remote("worker1", Value)
        rref.rpc_sync().hello()
        (leak,) = store.leaks()
        assert f"rref {rref._rref_id} (Value made by a call from 'worker0' (rank 0)" in leak
        assert f"with forks {rref._fork_id}" in leak
        del rref


def test_release_of_all_users(cluster):
    with cluster.on(0):
        rref = rpc.remote("worker1", Value)
        rref.rpc_sync().hello()
        cluster.runtimes[0].store.release_all_users()
        rpc.rpc_sync("worker1", len, args=((),))
        assert stats(cluster, 0).used == 0
        del rref  # a second release does nothing


def test_unknown_handles_are_let_go_without_a_word(cluster):
    store = cluster.runtimes[0].store
    store.release_user(ForkId(0, 99))
    store.drop_owner(RRefId(0, 99))
    store.confirm_user(ForkId(0, 99))
    assert not store.is_confirmed(ForkId(0, 99))


def test_ids_are_unique(cluster):
    store = cluster.runtimes[2].store
    ids = [store.new_rref_id(), store.new_fork_id(), store.new_rref_id()]
    assert {number.created_on for number in ids} == {2}
    assert len({number.local_id for number in ids}) == 3


def test_handle_whose_owner_leaves_is_not_waited_for():
    with LoopbackCluster(3) as cluster:
        hold_kinds(cluster, "ForkAccept")
        with cluster.on(0):
            rref = rpc.remote("worker1", Value)
            running = rpc.rpc_async("worker2", is_confirmed, args=(rref,))
            assert rpc.rpc_sync("worker2", max, args=(1, 2)) == 2
            cluster.runtimes[1].shutdown(graceful=False, timeout=0)
            assert running.wait() is False
            del rref, running
        cluster.shutdown(graceful=False)
