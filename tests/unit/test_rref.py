"""Unit tests for mpirpc.rref: what a handle knows and refuses; errors are kept without their frames."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import AutogradError, ConfigurationError, NotInitializedError, RpcTimeoutError, RRefError
from mpirpc.testing import LoopbackCluster


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, step=1):
        self.count += step
        return self.count

    def __getitem__(self, key):
        return key


def fail(text):
    raise ValueError(text)


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


def test_own_rref(cluster):
    value = Counter()
    rref = rpc.RRef(value)
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert (rref.is_owner(), rref.confirmed_by_owner(), rref.owner_name(), rref.owner().id) == (
        True,
        True,
        "worker0",
        0,
    )
    assert repr(rref) == f"OwnerRRef(RRefId={rref._rref_id}, owner=worker0)"


def test_rref_elsewhere(cluster):
    rref = rpc.remote("worker1", Counter)
    assert rref.to_here().count == 0
    assert (rref.is_owner(), rref.owner_name(), rref.owner().id) == (False, "worker1", 1)
    assert repr(rref) == f"UserRRef(RRefId={rref._rref_id}, ForkId={rref._fork_id}, owner=worker1)"


def test_local_value_is_refused_elsewhere(cluster):
    rref = rpc.remote("worker1", Counter)
    with pytest.raises(
        RRefError, match=r"(?s)called on 'worker0' \(rank 0\).*owned by 'worker1' \(rank 1\).*hint: "
    ):
        rref.local_value()


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_proxies(cluster, owner):
    rref = rpc.remote(owner, Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add().wait() == 3
    assert rref.remote().add().to_here() == 4
    with pytest.raises(AttributeError):
        rref.rpc_sync().__len__()
    with pytest.raises(AttributeError, match="absent"):
        rref.rpc_sync().absent()


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_pickling_outside_a_call_is_refused(cluster, make):
    with pytest.raises(RRefError, match="can only be pickled when using RPC"):
        make(rpc.RRef(1))


@pytest.mark.parametrize("timeout", [-2, -0.001, float("nan")])
@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_bad_timeouts(cluster, owner, timeout):
    rref = rpc.remote(owner, Counter)
    with pytest.raises(ConfigurationError, match="is not a time limit"):
        rref.to_here(timeout)
    with pytest.raises(ConfigurationError, match="is not a time limit"):
        rref.rpc_sync(timeout).add()


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_value_that_does_not_come_in_time(cluster, owner):
    cluster.network.hold()
    rref = rpc.remote(owner, Counter)
    with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout"):
        rref.to_here(timeout=0.01)
    cluster.network.release_all()
    assert rref.to_here().count == 0


def test_creation_that_times_out_is_told_at_use(cluster):
    cluster.network.hold(lambda source, dest, head: source == 1)
    rref = rpc.remote("worker1", Counter, timeout=0.01)
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        rref.rpc_sync(timeout=0.05).add()
    cluster.network.release_all()


class Thing:
    pass


def use_and_fail(rref, use):
    thing = Thing()
    with pytest.raises(ValueError, match="text"):
        use(rref)
    return weakref.ref(thing)


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@pytest.mark.parametrize(
    "use", [lambda r: r.to_here(), lambda r: r.rpc_sync().add()], ids=["to_here", "proxy"]
)
def test_kept_error_does_not_keep_the_frames_it_is_raised_in(cluster, owner, use):
    rref = rpc.remote(owner, fail, args=("text",))
    ref = use_and_fail(rref, use)
    gc.collect()
    assert ref() is None
    with pytest.raises(ValueError, match="text") as caught:
        use(rref)
    assert "in fail" in str(caught.value.__cause__)


def test_backward_at_the_owner_and_elsewhere(cluster):
    weight = torch.ones(1, requires_grad=True)
    rpc.RRef(weight.sum() * 3).backward()
    assert weight.grad.item() == 3
    rref = rpc.remote("worker1", torch.ones, args=(1,), kwargs={"requires_grad": True})
    with pytest.raises(AutogradError, match="require 'dist_autograd_ctx_id'"):
        rref.backward()
    with pytest.raises(AutogradError, match="should contain a tensor"):
        rpc.RRef(5).backward()


def test_use_after_the_creating_call_timed_out(cluster):
    """torch users rely on "RRef creation" in the message to tell this timeout from that of the use itself."""
    cluster.network.hold()
    rref = rpc.remote("worker1", Counter, timeout=0.01)
    with pytest.raises(RpcTimeoutError, match="ran for more than set timeout"):
        rref._calls.wait_result(rref._creation)
    with pytest.raises(RpcTimeoutError, match=r"RRef creation via remote\(\) timed out"):
        rref.to_here()
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        rref.rpc_sync().add()
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        rpc.rpc_async("worker1", fail, args=(rref,))
    cluster.network.release_all()


def test_forks_made_before_a_refused_one_are_taken_back(cluster):
    good = rpc.remote("worker1", Counter)
    good.to_here()
    cluster.network.hold()
    bad = rpc.remote("worker1", Counter, timeout=0.01)
    with pytest.raises(RpcTimeoutError):
        bad._calls.wait_result(bad._creation)
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        rpc.rpc_async("worker1", fail, args=(good, bad))
    cluster.network.release_all()


def test_without_a_group():
    with pytest.raises(NotInitializedError):
        rpc.RRef(1)


def test_handles_may_die_after_their_group():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        rrefs = [rpc.RRef(1), rpc.remote("worker1", Counter)]
    assert "OwnerRRef" in repr(rrefs[0])
    with pytest.raises(NotInitializedError, match="no call can be made"):
        rrefs[1].to_here()
    with pytest.raises(NotInitializedError, match="no call can be made"):
        rrefs[1].rpc_sync().add()
    del rrefs
