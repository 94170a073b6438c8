"""Unit tests for mpirpc._core.flow: callers that do not wait for answers are slowed, and nobody else."""

import contextlib
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0
GATE = threading.Event()


def pass_gate(_payload):
    GATE.wait(LIMIT)


def nothing():
    """Do nothing."""


def call_back(to, payload):
    """A call that needs another one: it must not be held up by the limit that its caller has reached."""
    return rpc.rpc_async(to, len, args=(payload,)).wait()


@pytest.fixture
def cluster():
    GATE.clear()
    options = rpc.MPIRpcBackendOptions(max_unfinished_nbytes=20_000, num_worker_threads=2)
    with LoopbackCluster(3, options) as made, made.on(0):
        yield made
        GATE.set()


def start_in_thread(cluster, function):
    def run():
        with cluster.on(0):
            function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def started_until_full(cluster, futures):
    """Start calls of 10 KiB to a callee that does not answer, in a thread, until it is held up."""
    flow = cluster.runtimes[0].agent._flow

    def start():
        for _ in range(8):
            futures.append(rpc.rpc_async("worker1", pass_gate, args=(bytes(10_000),)))

    thread = start_in_thread(cluster, start)
    while not flow.is_full(1):
        assert thread.is_alive()
    return thread


def test_slow_callee_slows_its_caller_only(cluster):
    futures = []
    thread = started_until_full(cluster, futures)
    assert len(futures) < 8
    assert rpc.rpc_sync("worker2", max, args=(1, 2)) == 2  # others are not held up
    GATE.set()
    thread.join(LIMIT)
    assert len(futures) == 8
    assert [future.wait() for future in futures] == [None] * 8
    assert cluster.runtimes[0].agent._flow._unanswered == {1: 0}


def test_function_that_runs_as_a_call_is_not_held_up(cluster):
    """worker0 has reached its limit towards worker1; a call that runs there calls worker1 all the same."""
    futures = []
    thread = started_until_full(cluster, futures)
    with cluster.on(2):
        assert rpc.rpc_sync("worker0", call_back, args=("worker2", bytes(10_000))) == 10_000
        future = rpc.rpc_async("worker0", call_back, args=("worker1", bytes(10_000)))
    GATE.set()
    assert future.wait() == 10_000
    thread.join(LIMIT)


def test_failed_and_late_calls_are_taken_off(cluster):
    future = rpc.rpc_async("worker1", pass_gate, args=(bytes(10_000),), timeout=0.01)
    with pytest.raises(rpc.RpcTimeoutError):
        future.wait()
    with pytest.raises(rpc.errors.SerializationError):
        rpc.rpc_async("worker1", pass_gate, args=(threading.Lock(),))
    GATE.set()  # the callee still has the first one: it counts until it is answered
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    flow = cluster.runtimes[0].agent._flow
    while any(flow._unanswered.values()):
        cluster.runtimes[0].agent.engine.wake()


def test_calls_that_time_out_do_not_pile_up_at_their_callee(cluster):
    for _ in range(20):
        with contextlib.suppress(rpc.RpcTimeoutError):
            rpc.rpc_async("worker1", pass_gate, args=(bytes(1000),), timeout=0.01).wait()
    assert cluster.runtimes[0].agent._flow.is_full(1)
    assert cluster.runtimes[1].server.num_open < 20
    GATE.set()


def test_held_up_caller_has_its_deadline(cluster):
    futures = []
    thread = started_until_full(cluster, futures)
    served = cluster.runtimes[1].server.num_served
    said = r"nothing was not sent to 'worker1' \(rank 1\), .* max_unfinished_nbytes = 20000"
    with pytest.raises(rpc.RpcTimeoutError, match=said):
        rpc.rpc_async("worker1", nothing, timeout=0.01)
    with pytest.raises(rpc.RpcTimeoutError, match=said):
        rpc.remote("worker1", nothing, timeout=0.01)
    GATE.set()
    thread.join(LIMIT)
    assert rpc.wait(futures) == [None] * 8
    assert cluster.runtimes[1].server.num_served == served + 8  # neither was sent


# --- the same call to several workers ---


def heard(payload, tensor):
    return rpc.get_worker_info().name, len(payload), tensor.sum().item()


def owner_of(rref):
    return rref.owner_name()


def test_broadcast_answers_in_order(cluster):
    futures = rpc.broadcast(["worker2", 1, 0], heard, args=(b"abc", torch.ones(3)))
    assert rpc.wait(futures) == [("worker2", 3, 3.0), ("worker1", 3, 3.0), ("worker0", 3, 3.0)]
    assert rpc.broadcast([], heard) == []


class CountsPickles:
    num_pickled = 0

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        CountsPickles.num_pickled += 1
        return CountsPickles, (self.data,)

    def __len__(self):
        return len(self.data)


def test_broadcast_pickles_once(cluster):
    """Also what is so large that it travels as a frame."""
    for size in (10, 3 << 20):
        CountsPickles.num_pickled = 0
        futures = rpc.broadcast(range(3), len, args=(CountsPickles(bytes(size)),))
        assert rpc.wait(futures) == [size] * 3
        assert CountsPickles.num_pickled == 1


def test_broadcast_of_rrefs_and_errors(cluster):
    rref = rpc.remote("worker1", max, args=(1, 2))
    assert rpc.wait(rpc.broadcast(range(3), owner_of, args=(rref,))) == ["worker1"] * 3
    with pytest.raises(rpc.errors.UnknownWorkerError):
        rpc.broadcast([0, 7], nothing)


def test_broadcast_in_a_context(cluster):
    a = torch.ones(3, requires_grad=True)
    with rpc.autograd.context() as context_id:
        parts = rpc.wait(rpc.broadcast(range(3), torch.mul, args=(a, 2.0)))
        rpc.autograd.backward(context_id, [sum(parts).sum()])
        assert rpc.autograd.get_gradients(context_id)[a].tolist() == [6.0] * 3
