"""The time limit of ``backward`` over whole workers whose messages the test holds back (guarantee A5)."""

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import ConfigurationError, RpcTimeoutError
from mpirpc.testing import LoopbackCluster

LIMIT = 0.05
MISSING = r"ran for more than set timeout \(0\.05 s\): no answer yet from 'worker1' \(rank 1\)\n"

WEIGHT = torch.tensor([3.0, 4.0], requires_grad=True)


@pytest.fixture
def cluster():
    """Two workers; their calls have limits only where the test says so."""
    with LoopbackCluster(2, rpc.MPIRpcBackendOptions(rpc_timeout=LIMIT)) as made, made.on(0):
        yield made


def scale(x):
    return x * WEIGHT


def leaf():
    return torch.tensor([1.0, 2.0], requires_grad=True)


def loss_over(x):
    return rpc.rpc_sync("worker1", scale, args=(x,), timeout=0).sum()


def contexts():
    """How many contexts each worker knows; what was sent to it before has been handled there."""
    return [rpc.rpc_sync(rank, rpc.debug_info, timeout=0)["autograd_contexts"] for rank in range(2)]


def assert_works():
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_over(x)], timeout=0)
        assert torch.equal(autograd.get_gradients(context_id)[x], WEIGHT)


@pytest.mark.parametrize("place", [0, -1], ids=["oldest first", "newest first"])
def test_limit_names_the_worker_and_late_messages_are_dropped(cluster, place):
    x = leaf()
    with autograd.context() as context_id:
        loss = loss_over(x)
        cluster.network.hold(lambda source, dest, head: dest == 1)
        with pytest.raises(RpcTimeoutError, match=MISSING) as caught:
            autograd.backward(context_id, [loss], timeout=LIMIT)
        assert (caught.value.worker, caught.value.timeout) == ("'worker1' (rank 1)", LIMIT)
        assert x not in autograd.get_gradients(context_id)
    cluster.network.hold(lambda source, dest, head: False)
    assert len(cluster.network.held) == 3  # a gradient, the failure, the context's end
    while cluster.network.held:
        cluster.network.release(place)
    assert contexts() == [0, 0]
    assert_works()


def test_next_pass_in_the_same_context_gets_nothing_of_the_dead_one(cluster):
    x = leaf()
    with autograd.context() as context_id:
        loss = loss_over(x)
        cluster.network.hold(lambda source, dest, head: source == 1)
        with pytest.raises(RpcTimeoutError, match=MISSING):
            autograd.backward(context_id, [loss], retain_graph=True, timeout=LIMIT)
        cluster.network.hold(lambda source, dest, head: False)
        autograd.backward(context_id, [loss], timeout=0)
        cluster.network.release_all()
        assert contexts() == [1, 1]
        assert torch.equal(autograd.get_gradients(context_id)[x], WEIGHT)


def test_limit_is_that_of_the_group_by_default(cluster):
    with autograd.context() as context_id:
        losses = [loss_over(leaf()) for _ in range(2)]
        cluster.network.hold(lambda source, dest, head: dest == 1)
        with pytest.raises(RpcTimeoutError, match=MISSING):
            autograd.backward(context_id, losses[:1])
        with pytest.raises(RpcTimeoutError, match=MISSING):
            rpc.RRef(losses[1]).backward(context_id)
        cluster.network.release_all()
    assert_works()


def test_what_is_no_limit_is_refused(cluster):
    with autograd.context() as context_id:
        loss = loss_over(leaf())
        with pytest.raises(ConfigurationError, match="timeout=-2 is not a time limit"):
            autograd.backward(context_id, [loss], timeout=-2)
        autograd.backward(context_id, [loss], timeout=0)
