"""Unit tests for mpirpc._core.runtime: parts start and stop in order, the end waits for what it must."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc._core.messages import ForkId
from mpirpc.errors import LocalProtocolError, NotInitializedError, RpcTimeoutError, RRefError
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0


class Gate:
    opened = threading.Event()
    entered = threading.Event()


@pytest.fixture(autouse=True)
def gate():
    Gate.opened.clear()
    Gate.entered.clear()
    yield
    Gate.opened.set()


def wait_for_the_gate():
    Gate.entered.set()
    assert Gate.opened.wait(LIMIT)
    return "through"


def chain(depth):
    if depth:
        rpc.rpc_async(1 - rpc.get_worker_info().id, chain, args=(depth - 1,))


def shut_down():
    rpc.shutdown()


def test_graceful_end_waits_for_running_calls():
    cluster = LoopbackCluster(2)
    with cluster.on(0):
        future = rpc.rpc_async(1, wait_for_the_gate)
    assert Gate.entered.wait(LIMIT)
    ending = threading.Thread(target=cluster.shutdown)
    ending.start()
    assert not future.done()
    Gate.opened.set()
    ending.join(LIMIT)
    assert not ending.is_alive()
    assert future.wait() == "through"


def test_graceful_end_waits_for_calls_that_calls_make():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        rpc.rpc_async(1, chain, args=(20,))
    assert sum(runtime.server.num_served for runtime in cluster.runtimes) == 21


def test_graceful_end_waits_for_held_messages():
    cluster = LoopbackCluster(2)
    cluster.network.hold()
    with cluster.on(0):
        future = rpc.rpc_async(1, max, args=(1, 2))
    ending = threading.Thread(target=cluster.shutdown)
    ending.start()
    cluster.network.release_all()
    ending.join(LIMIT)
    assert future.wait() == 2


def test_end_with_a_limit():
    cluster = LoopbackCluster(2)
    runtime = cluster.runtimes[0]
    with pytest.raises(
        RpcTimeoutError, match=r"shutdown of 'worker0' \(rank 0\) timed out: 0 requests pending"
    ):
        runtime.shutdown(graceful=True, timeout=0.05)
    assert not runtime.is_running
    cluster.shutdown(graceful=False)


def test_ungraceful_end_fails_what_is_pending():
    cluster = LoopbackCluster(2)
    cluster.network.hold()
    with cluster.on(0):
        future = rpc.rpc_async(1, max, args=(1, 2))
    cluster.shutdown(graceful=False)
    with pytest.raises(NotInitializedError, match="pending when"):
        future.wait()


def test_end_inside_a_call_is_refused():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        with pytest.raises(LocalProtocolError, match="runs as a call"):
            rpc.rpc_sync(1, shut_down)
        assert rpc.rpc_sync(1, max, args=(1, 2)) == 2


def leak(cluster):
    """A fork that no worker has: as if a message of the protocol had been lost."""
    with cluster.on(1):
        rref = rpc.RRef(torch.ones(1))
        cluster.runtimes[1].store._owned.add_fork(rref._rref_id, ForkId(1, 999))
        return rref._rref_id


def test_values_still_referenced_are_reported():
    cluster = LoopbackCluster(2)
    rref_id = leak(cluster)
    with pytest.raises(RRefError, match=rf"1 values of 'worker1' \(rank 1\) .* rref {rref_id} \(Tensor"):
        cluster.shutdown()
    assert not any(runtime.is_running for runtime in cluster.runtimes)


def test_handles_still_held_are_no_leaks():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        held = [rpc.remote(1, torch.ones, args=(1,)), rpc.RRef(1)]
        held[0].to_here()
    assert len(held) == 2


def test_repr_tells_whether_it_runs():
    with LoopbackCluster(1) as cluster:
        assert repr(cluster.runtimes[0]) == "Runtime('worker0' (rank 0), running)"
    assert repr(cluster.runtimes[0]) == "Runtime('worker0' (rank 0), stopped)"


def test_debug_info_of_an_idle_worker():
    with LoopbackCluster(1) as cluster:
        info = cluster.runtimes[0].debug_info()
        threads = info.pop("executor_threads")
        assert threads >= 1
        assert not any(value for name, value in info.items()), info


def test_executor_threads_belong_to_their_runtime():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        assert [rpc.rpc_sync(rank, rpc.get_worker_info).id for rank in (0, 1)] == [0, 1]
