"""Unit tests for workers that leave without waiting for the group: whoever waits for them is told at once."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import WorkerLostError
from mpirpc.testing import LoopbackCluster

GATE = threading.Event()


@pytest.fixture
def cluster():
    """Three workers; they may be stopped by the test, and none waits for the others at the end."""
    GATE.clear()
    made = LoopbackCluster(3)
    yield made
    GATE.set()
    made.shutdown(graceful=False)


def leave(cluster, rank):
    with cluster.on(rank) as runtime:
        runtime.shutdown(graceful=False, timeout=0)


def wait_for_the_gate():
    GATE.wait(30)


def double(tensor):
    return tensor * 2


def double_there(worker, tensor):
    return rpc.rpc_sync(worker, double, args=(tensor,))


def test_later_calls_fail_and_those_of_others_do_not(cluster):
    with cluster.on(0):
        other = rpc.rpc_async("worker2", wait_for_the_gate)
        leave(cluster, 1)
        with pytest.raises(WorkerLostError, match=r"'worker1' \(rank 1\) left the group"):
            rpc.rpc_async("worker1", wait_for_the_gate).wait()
        GATE.set()
        assert other.wait() is None


def test_a_call_that_is_waited_for_fails(cluster):
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: dest == 1)
        future = rpc.rpc_async("worker1", max, args=(1, 2))
        leave(cluster, 1)
        with pytest.raises(WorkerLostError, match="no response to request"):
            future.wait()


def test_graceful_shutdown_does_not_wait_for_who_is_gone(cluster):
    leave(cluster, 1)
    with cluster.on(0) as runtime, pytest.raises(WorkerLostError, match=r"'worker1' \(rank 1\) left"):
        runtime.shutdown(graceful=True, timeout=0)
    with cluster.on(2) as runtime, pytest.raises(WorkerLostError):
        runtime.shutdown(graceful=True, timeout=0)


# --- backward passes ---


@pytest.fixture
def weight():
    return torch.ones(1, requires_grad=True)


def test_backward_that_needs_a_worker_that_is_gone(cluster, weight):
    with cluster.on(0), rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", double, args=(weight,)).sum()
        leave(cluster, 1)
        with pytest.raises(WorkerLostError, match=r"a backward pass needs 'worker1' \(rank 1\)"):
            rpc.autograd.backward(context_id, [loss])


def test_backward_through_a_worker_whose_neighbour_is_gone(cluster, weight):
    with cluster.on(0), rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", double_there, args=("worker2", weight)).sum()
        leave(cluster, 2)
        with pytest.raises(RuntimeError, match=r"a backward pass needs 'worker2' \(rank 2\)"):
            rpc.autograd.backward(context_id, [loss])


def test_worker_that_leaves_during_a_pass(cluster, weight):
    with cluster.on(0), rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", double, args=(weight,)).sum()
        cluster.network.hold(lambda source, dest, head: dest == 1)
        threading.Timer(0.05, leave, (cluster, 1)).start()
        with pytest.raises(WorkerLostError, match=r"a backward pass needs 'worker1' \(rank 1\)"):
            rpc.autograd.backward(context_id, [loss])


def test_contexts_without_it_go_on(cluster, weight):
    with cluster.on(0), rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker2", double, args=(weight,)).sum()
        leave(cluster, 1)
        rpc.autograd.backward(context_id, [loss])
        assert rpc.autograd.get_gradients(context_id)[weight].item() == 2
