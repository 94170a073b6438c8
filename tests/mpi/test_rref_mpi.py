"""RRefs over real ranks: the sharing cases of torch's RRef design note, errors kept until use, proxies.

Rank 0 calls; the others serve inside the fixture, which checks that no value and no handle is left.
"""

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import RRefError, SerializationError


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, step, times=1):
        self.count += step * times
        return self.count

    def tensor(self, numel):
        return torch.full((numel,), float(self.count))

    def itself(self):
        return rpc.RRef(self)

    def fail(self):
        raise ArithmeticError(f"at {self.count}")

    def __call__(self, x):
        return self.count + x


def fail(text):
    raise ValueError(text)


def read(rref):
    return rref.to_here()


def read_local(rref):
    return rref.local_value()


def pass_on(rref, names):
    """Give the handle to the next worker, which gives it on; the last one reads it."""
    return rpc.rpc_sync(names[0], pass_on, args=(rref, names[1:])) if names else rref.to_here()


def make_here(value):
    return rpc.RRef(value)


def identity(x):
    return x


def describe(rref):
    return rref.is_owner(), rref.owner_name(), rref.owner().id


def count_up():
    yield from range(1, 10)


_kept = []


def keep(rref):
    _kept.append(rref)


def read_kept_and_drop():
    return _kept.pop().to_here()


def next_rank(world, step=1):
    return world.names[step % world.size]


# --- the four sharing cases ---


@pytest.mark.mpi(min_size=2)
def test_creator_reads_from_the_owner(rpc_world):
    """User A creates on owner B and fetches."""
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        assert rref.to_here().tolist() == [2, 2]
        assert (rref.is_owner(), rref.owner_name(), rref.owner().id) == (False, "worker1", 1)
        while not rref.confirmed_by_owner():  # soon: the value may come before the confirmation
            assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2


@pytest.mark.mpi(min_size=2)
def test_user_shares_with_the_owner(rpc_world):
    """User A sends its handle to owner B as an argument."""
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", Counter, args=(5,))
        assert rpc.rpc_sync("worker1", describe, args=(rref,)) == (True, "worker1", 1)
        assert rpc.rpc_sync("worker1", read_local, args=(rref,)).count == 5


@pytest.mark.mpi(min_size=2)
def test_owner_shares_with_a_user(rpc_world):
    """Owner A sends its own RRef to user B, which fetches from A."""
    if rpc_world.rank == 0:
        rref = rpc.RRef(torch.arange(3))
        assert rpc.rpc_sync("worker1", read, args=(rref,)).tolist() == [0, 1, 2]
        assert rpc.rpc_sync("worker1", describe, args=(rref,)) == (False, "worker0", 0)


@pytest.mark.mpi(min_size=3)
def test_user_shares_with_another_user(rpc_world):
    """User A sends its handle of B's value to user C: the hardest of the four."""
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", torch.ones, args=(2,))
        assert rpc.rpc_sync("worker2", read, args=(rref,)).tolist() == [1, 1]
        assert rpc.rpc_sync("worker2", describe, args=(rref,)) == (False, "worker1", 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rounds", [1, 5])
def test_handle_goes_round_many_workers(rpc_world, rounds):
    if rpc_world.rank == 0:
        rref = rpc.remote(next_rank(rpc_world), torch.ones, args=(2,))
        route = [*rpc_world.names[1:], *rpc_world.names] * rounds
        assert rpc.rpc_sync(route[0], pass_on, args=(rref, route[1:])).tolist() == [1, 1]


@pytest.mark.mpi(min_size=2)
def test_handle_outlives_the_one_it_was_made_from(rpc_world):
    if rpc_world.rank == 0:
        last = rpc_world.names[-1]
        for _ in range(20):
            rpc.rpc_sync(last, keep, args=(rpc.remote("worker1", torch.ones, args=(1,)),))
        for _ in range(20):
            assert rpc.rpc_sync(last, read_kept_and_drop).item() == 1


@pytest.mark.mpi(min_size=2)
def test_rref_as_result(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.rpc_sync("worker1", make_here, args=(torch.ones(2),))
        assert rref.owner_name() == "worker1"
        assert rref.to_here().tolist() == [1, 1]
        mine = rpc.rpc_sync("worker1", identity, args=(rpc.RRef("home"),))
        assert mine.is_owner()
        assert mine.local_value() == "home"


@pytest.mark.mpi(min_size=2)
def test_rrefs_inside_structures(rpc_world):
    if rpc_world.rank == 0:
        rrefs = {"a": [rpc.RRef(1), rpc.remote("worker1", Counter)], "b": (torch.ones(1),)}
        received = rpc.rpc_sync("worker1", identity, args=(rrefs,))
        assert received["a"][0].local_value() == 1
        assert received["a"][1].rpc_sync().add(2) == 2


@pytest.mark.mpi(min_size=2)
def test_rref_of_an_rref(rpc_world):
    if rpc_world.rank == 0:
        outer = rpc.remote("worker1", make_here, args=(5,))
        assert outer.to_here().to_here() == 5


@pytest.mark.mpi(min_size=2)
def test_used_before_it_is_made(rpc_world):
    """The handle arrives at its owner maybe before the call that makes the value has run."""
    if rpc_world.rank == 0:
        for _ in range(50):
            rref = rpc.remote("worker1", Counter, args=(1,))
            assert rref.rpc_sync().add(1) == 2


@pytest.mark.mpi(min_size=2)
def test_many_handles_made_and_dropped(rpc_world):
    peer = rpc_world.names[(rpc_world.rank + 1) % rpc_world.size]
    rrefs = [rpc.remote(peer, Counter, args=(i,)) for i in range(200)]
    assert [rref.rpc_sync().add(0) for rref in rrefs[::10]] == list(range(0, 200, 10))
    del rrefs
    rpc_world.barrier()


@pytest.mark.mpi(min_size=2)
def test_remote_on_oneself(rpc_world):
    rref = rpc.remote(rpc_world.name, Counter, args=(3,))
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value().count == 3
    assert rref.to_here() is rref.local_value()
    assert rref.rpc_sync().add(1) == 4


@pytest.mark.mpi(min_size=2)
def test_large_value(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", torch.ones, args=(1 << 20,))
        assert rref.to_here().sum() == 1 << 20


# --- proxies ---


@pytest.mark.mpi(min_size=2)
def test_proxies(rpc_world):
    if rpc_world.rank:
        return
    for owner in ("worker0", "worker1"):
        rref = rpc.remote(owner, Counter)
        assert rref.rpc_sync().add(2, times=3) == 6
        assert rref.rpc_async().add(1).wait() == 7
        assert rref.remote().add(1).to_here() == 8
        assert rref.rpc_sync().tensor(3).tolist() == [8, 8, 8]
        assert rref.rpc_sync()(2) == 10
        again = rref.rpc_sync().itself()
        assert again.rpc_sync().add(0) == 8


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_proxy_errors(rpc_world, owner):
    if rpc_world.rank == 0:
        rref = rpc.remote(owner, Counter, args=(7,))
        with pytest.raises(AttributeError, match="nothing"):
            rref.rpc_sync().nothing()
        with pytest.raises(ArithmeticError, match="at 7"):
            rref.rpc_async().fail().wait()
        failed = rref.remote().fail()
        with pytest.raises(ArithmeticError, match="at 7"):
            failed.to_here()


# --- errors ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_error_of_the_creating_call_is_kept_and_raised_at_every_use(rpc_world, owner):
    if rpc_world.rank == 0:
        rref = rpc.remote(owner, fail, args=("no value",))
        uses = [
            lambda: rref.to_here(),
            lambda: rref.to_here(),
            lambda: rref.rpc_sync().add(1),
            lambda: rref.rpc_async().add(1).wait(),
            lambda: rref.remote().add(1).to_here(),
            lambda: rpc.rpc_sync(rpc_world.names[-1], read, args=(rref,)),
            lambda: rpc.rpc_sync(owner, read_local, args=(rref,)),
        ]
        for use in uses:
            with pytest.raises(ValueError, match="no value"):
                use()


@pytest.mark.mpi(min_size=2)
def test_local_value_elsewhere_is_refused_with_names(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", Counter)
        with pytest.raises(RRefError, match=r"'worker0' \(rank 0\).*owned by 'worker1' \(rank 1\)") as caught:
            rref.local_value()
        assert "to_here()" in caught.value.hint
        assert rref.rpc_sync().add(1) == 1


@pytest.mark.mpi(min_size=2)
def test_call_that_could_not_be_sent_makes_no_rref(rpc_world):
    if rpc_world.rank == 0:
        for owner in ("worker0", "worker1"):
            with pytest.raises(SerializationError):
                rpc.remote(owner, identity, args=((i for i in ()),))
        assert rpc.debug_info()["used_rrefs"] == 0


@pytest.mark.mpi(min_size=2)
def test_value_that_cannot_travel_is_used_in_place(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", count_up)
        with pytest.raises(SerializationError, match="cannot send <generator object count_up"):
            rref.to_here()
        assert [rref.rpc_sync().send(None) for _ in range(3)] == [1, 2, 3]
