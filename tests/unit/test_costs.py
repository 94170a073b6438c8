"""What an operation costs, in things that can be counted: messages, copies, threads, Python function calls.

Times are measured by ``python -m mpirpc bench``, never asserted. A bound here is what the page
docs/design/performance.md says; when one is raised, that page has to say why.
"""

import marshal
import sys
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc._core import messages as m
from mpirpc._core import wire
from mpirpc._core.agent import WorkerInfo
from mpirpc._core.current import set_thread_runtime
from mpirpc._core.pickling import dumps_call, dumps_result
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport import Arrival, TransportStats
from mpirpc.testing import LoopbackCluster

EAGER = 1024


def nothing():
    """Do nothing."""


def thread_name():
    return threading.current_thread().name


@pytest.fixture
def cluster():
    with LoopbackCluster(2, rpc.MPIRpcBackendOptions(eager_limit=EAGER)) as made, made.on(0):
        yield made


def messages_of(cluster, operation):
    """Messages that both workers send for one operation, from the second one on."""
    counts = []
    for _ in range(2):
        before = sum(runtime.debug_info()["messages_sent"] for runtime in cluster.runtimes)
        operation()
        while not all(
            runtime._is_quiet() and not runtime.agent.engine.chores for runtime in cluster.runtimes
        ):
            cluster.runtimes[0].agent.engine.wake()
        counts.append(sum(runtime.debug_info()["messages_sent"] for runtime in cluster.runtimes) - before)
    return counts[-1]


def create_and_fetch():
    assert rpc.remote("worker1", max, args=(1, 2)).to_here() == 2


def autograd_step():
    a = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(a, a)).sum()
        autograd.backward(context_id, [loss])
        autograd.get_gradients(context_id)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda: rpc.rpc_sync("worker1", nothing), 2),
        (lambda: rpc.rpc_sync("worker1", torch.add, args=(torch.ones(3), torch.ones(3))), 2),
        (lambda: rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(100_000),)), 2),
        (create_and_fetch, 5),  # call, confirmation, question, value, delete
        (autograd_step, 5),  # call, result, two gradients, release
    ],
    ids=["no-op", "small tensors", "large tensor", "remote and to_here", "autograd step"],
)
def test_messages(cluster, operation, expected):
    assert messages_of(cluster, operation) == expected


def test_function_runs_on_the_thread_that_received_its_call(cluster):
    """No switch of threads between a message and its function: the thread that polls runs it.

    Unless the deputy looks for works in just that moment and comes first, which the law does not exclude: so
    this counts calls.
    """
    received_by, calls, unswitched = [], 40, 0
    engine = cluster.runtimes[1].agent.engine
    handle = engine._handle
    engine._handle = lambda arrival: (
        received_by.append(threading.current_thread().name),
        handle(arrival),
    )[1]
    for _ in range(calls):
        received_by.clear()
        unswitched += rpc.rpc_sync("worker1", thread_name) in received_by
    assert unswitched > calls // 2


def test_large_tensor_is_not_copied_by_its_sender_nor_by_its_receiver():
    sent = torch.zeros(10 * EAGER)
    outgoing = wire.encode(m.CallResponse(1), dumps_result(sent), EAGER)
    assert [frame.data_ptr() for frame in outgoing.frames] == [sent.data_ptr()]
    arrived = [frame.clone() for frame in outgoing.frames]  # what the network does
    body, _ = wire.decode(bytearray(outgoing.head), arrived).body()
    assert [tensor.data_ptr() for tensor in body.tensors] == [frame.data_ptr() for frame in arrived]


# --- Python function calls ---


class Answering:
    """A transport that answers each call at once with the same response."""

    rank, world_size = 0, 2
    survives_losses = False
    bell = None

    def __init__(self, result):
        self.response = marshal.loads(wire.encode(m.CallResponse(0), dumps_result(result), 32768).head)
        self.answers = []
        self.keeps = False
        self.on_lost = None

    def post_send(self, dest, message):
        if not self.keeps:
            request_id, response = marshal.loads(message.head)[2][0], self.response
            head = marshal.dumps((*response[:2], (request_id, 0, 0), *response[3:]), 2)
            self.answers.append(Arrival(dest, bytearray(head), []))

    def poll(self):
        return (self.answers.pop(),) if self.answers else ()

    def has_unfinished(self):
        return False

    def unfinished_nbytes(self, dest):
        return 0

    def stats(self):
        return TransportStats(0, 0, 0, 0, 0, 0)

    def close(self, graceful):
        """Nothing to close."""


@pytest.fixture
def lone():
    """A worker with nobody behind its network, and no threads of its own."""
    options = rpc.MPIRpcBackendOptions(spin_time=0, idle_sleep=5.0)
    runtime = Runtime(Answering(None), [WorkerInfo("worker0", 0), WorkerInfo("worker1", 1)], options)
    runtime.agent.executor.stop()
    before = set_thread_runtime(runtime)
    yield runtime
    set_thread_runtime(before)


def python_calls(operation):
    counts = [0]

    def profile(_frame, event, _argument):
        counts[0] += event == "call"

    operation()
    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return counts[0]


def test_python_calls_of_a_caller(lone):
    assert python_calls(lambda: rpc.rpc_sync(1, nothing)) <= 39


def test_python_calls_of_a_callee(lone):
    lone.transport.keeps = True
    head = wire.encode(m.CallRequest(7), dumps_call((nothing, (), {})), 32768).head

    def serve():
        lone.agent._on_arrival(Arrival(1, bytearray(head), []))
        lone.agent.engine.works.popleft()()

    assert python_calls(serve) <= 28
