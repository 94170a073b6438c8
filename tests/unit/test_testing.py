"""Unit tests for mpirpc.testing: a whole group in one process, its network in the test's hands."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc._core.current import get_current_or_none
from mpirpc.errors import NotInitializedError, RpcTimeoutError
from mpirpc.testing import LoopbackCluster
from tests.unit.waiting import until


def whoami():
    return rpc.get_worker_info().id


def test_every_worker_calls_every_worker():
    with LoopbackCluster(3) as cluster:
        for rank in range(3):
            with cluster.on(rank):
                assert [rpc.rpc_sync(f"worker{to}", whoami) for to in range(3)] == [0, 1, 2]


def test_being_a_worker_nests_and_ends():
    with LoopbackCluster(2) as cluster:
        with cluster.on(0):
            with cluster.on(1) as runtime:
                assert whoami() == runtime.agent.rank == 1
            assert whoami() == 0
        assert get_current_or_none() is None


def test_names_and_options():
    options = rpc.MPIRpcBackendOptions(rpc_timeout=5)
    with LoopbackCluster(2, options, names=["ps", "trainer"]) as cluster, cluster.on(1) as runtime:
        assert rpc.rpc_sync("ps", whoami) == 0
        assert runtime.options.rpc_timeout == 5


def test_held_message_arrives_when_released():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        cluster.network.hold()
        future = rpc.rpc_async("worker1", whoami)
        until(lambda: cluster.network.held)  # it may leave on the thread that polls
        assert not future.done()
        cluster.network.release_all()
        assert future.wait() == 1


def test_leaving_with_an_error_does_not_wait():
    def fail():
        with LoopbackCluster(2) as cluster, cluster.on(0):
            cluster.network.hold()
            rpc.rpc_async("worker1", whoami)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()


def test_dropped_messages_keep_the_group_from_ending_well():
    cluster = LoopbackCluster(2)
    cluster.network.drop(lambda source, dest, head: True)
    with cluster.on(0):
        future = rpc.rpc_async("worker1", whoami)
    with pytest.raises(RpcTimeoutError, match="timed out"):
        cluster.shutdown(timeout=0.05)
    with pytest.raises(NotInitializedError):
        future.wait()


def test_no_thread_is_left():
    before = set(threading.enumerate())
    with LoopbackCluster(3) as cluster, cluster.on(0):
        futures = [rpc.rpc_async(f"worker{i % 3}", torch.add, args=(i, 1)) for i in range(30)]
        torch.futures.wait_all(futures)
    assert set(threading.enumerate()) <= before


def test_two_groups_at_once():
    with LoopbackCluster(2, names=["a", "b"]) as first, LoopbackCluster(2, names=["c", "d"]) as second:
        with first.on(0):
            assert rpc.rpc_sync("b", whoami) == 1
        with second.on(0):
            assert rpc.rpc_sync("d", whoami) == 1
