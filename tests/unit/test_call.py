"""Unit tests for mpirpc._core.call: start, run, finish; what each undoes when it fails."""

import threading
from types import SimpleNamespace

import pytest
import torch

import mpirpc as rpc
from mpirpc._core import messages as m
from mpirpc._core.messages import ForkId, RRefId
from mpirpc.errors import NotAFutureError, RpcTimeoutError, RRefError, SerializationError
from mpirpc.testing import LoopbackCluster
from tests.unit.waiting import until

LIMIT = 30.0


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not for sending")


class FailsToLoad:
    def __reduce__(self):
        return fail, ("while loading",)


def fail(text):
    raise ValueError(text)


def identity(x):
    return x


def with_unpicklable(rref):
    return rref, Unpicklable()


def change(tensor):
    return tensor.add_(1)


def nested(depth):
    me = rpc.get_worker_info().id
    return 0 if depth == 0 else 1 + rpc.rpc_sync(1 - me, nested, args=(depth - 1,))


@pytest.fixture
def cluster():
    """Two workers with one thread each; the end of the group checks that no RRef is left."""
    with LoopbackCluster(2, rpc.MPIRpcBackendOptions(num_worker_threads=1)) as made, made.on(0):
        yield made
        until(lambda: all(runtime.agent.num_pending == 0 for runtime in made.runtimes))


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("numel", [1, 100_000])
def test_arguments_and_results_are_copies(cluster, to, numel):
    tensor = torch.zeros(numel)
    assert rpc.rpc_sync(to, change, args=(tensor,)).sum() == numel
    assert tensor.sum() == 0


def test_nested_calls_deeper_than_there_are_threads(cluster):
    assert rpc.rpc_sync(1, nested, args=(30,)) == 30


@pytest.mark.parametrize("way", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("to", [0, 1])
def test_call_that_cannot_be_sent_leaves_no_handle(cluster, way, to):
    rref, theirs = rpc.RRef(1), rpc.remote(1, identity, args=(2,))
    before = rpc.debug_info()
    with pytest.raises(SerializationError, match="not for sending"):
        way(to, identity, args=([rref, theirs, Unpicklable()],))
    assert theirs.to_here() == 2
    after = rpc.debug_info()
    assert [after[key] for key in ("forks", "used_rrefs")] == [before[key] for key in ("forks", "used_rrefs")]


def test_result_that_cannot_be_sent_leaves_no_handle(cluster):
    with pytest.raises(SerializationError, match="not for sending"):
        rpc.rpc_sync(1, with_unpicklable, args=(rpc.RRef(1),))


def test_argument_that_cannot_be_rebuilt_leaves_no_handle(cluster):
    with pytest.raises(SerializationError, match="while loading") as caught:
        rpc.rpc_sync(1, identity, args=([rpc.RRef(1), FailsToLoad()],))
    assert "on 'worker1' (rank 1)" in str(caught.value.__cause__)


def test_result_that_cannot_be_rebuilt(cluster):
    with pytest.raises(SerializationError, match="while loading"):
        rpc.rpc_sync(1, FailsToLoad)
    with pytest.raises(SerializationError, match="while loading"):
        rpc.rpc_async(1, FailsToLoad).wait()


def test_late_response_with_a_handle_in_it(cluster):
    cluster.network.hold(lambda source, dest, head: (source, dest) == (1, 0))
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(1, rpc.RRef, args=(torch.ones(1),), timeout=0.01)
    cluster.network.release_all()
    assert rpc.rpc_sync(1, identity, args=(1,)) == 1


def test_counts(cluster):
    rpc.rpc_sync(1, identity, args=(1,))
    rpc.rpc_sync(0, identity, args=(1,))
    info = [runtime.debug_info() for runtime in cluster.runtimes]
    assert (info[0]["calls_sent"], info[0]["calls_served"], info[1]["calls_served"]) == (2, 1, 1)
    assert [entry["open_calls"] for entry in info] == [0, 0]


# --- methods of a value ---


class Slow:
    """A value whose making waits for the gate."""

    gate = threading.Event()

    def __init__(self):
        assert Slow.gate.wait(LIMIT)

    def hello(self, *args):
        return "hello", args


@rpc.functions.async_execution
def make_later():
    future = torch.futures.Future()
    waiting.append(future)
    arrived.set()
    return future


waiting = []
arrived = threading.Event()


def test_methods_and_fetches_wait_for_the_value_without_a_thread(cluster):
    """worker1 has one thread; the value comes from an async_execution function, so none is taken."""
    arrived.clear()
    rref = rpc.remote(1, make_later)
    methods = [rref.rpc_async().upper() for _ in range(5)]
    fetched = rpc.rpc_async(0, rpc.RRef.to_here, args=(rref,))
    assert arrived.wait(LIMIT)
    assert rpc.rpc_sync(1, identity, args=(1,)) == 1
    waiting.pop().set_result("text")
    assert [future.wait() for future in methods] == ["TEXT"] * 5
    assert fetched.wait() == "text"


def test_method_gets_handles_as_arguments(cluster):
    Slow.gate.set()
    rref = rpc.remote(1, Slow)
    text, (other,) = rref.rpc_sync().hello(rpc.RRef(5))
    assert (text, other.local_value()) == ("hello", 5)


# --- async_execution ---


@rpc.functions.async_execution
def answer_with(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@rpc.functions.async_execution
def fails_at_once():
    raise ValueError("at once")


@rpc.functions.async_execution
def failed_future():
    future = torch.futures.Future()
    future.set_exception(ValueError("in the future"))
    return future


@rpc.functions.async_execution
def collected(value):
    first, second = torch.futures.Future(), torch.futures.Future()
    both = torch.futures.collect_all([first, second])  # an object of another class than those two
    first.set_result(value)
    second.set_result(value)
    return both.then(lambda done: sum(future.value() for future in done.value()))


@rpc.functions.async_execution
def no_future():
    return 5


@pytest.mark.parametrize("to", [0, 1])
def test_async_execution(cluster, to):
    assert rpc.rpc_sync(to, answer_with, args=(5,)) == 5
    assert rpc.rpc_sync(to, collected, args=(5,)) == 10
    with pytest.raises(ValueError, match="at once"):
        rpc.rpc_sync(to, fails_at_once)
    with pytest.raises(ValueError, match="in the future"):
        rpc.rpc_sync(to, failed_future)
    with pytest.raises(NotAFutureError, match=r"must return a torch\.futures\.Future object.* returned int"):
        rpc.rpc_sync(to, no_future)


def test_async_execution_with_a_result_that_cannot_be_sent(cluster):
    with pytest.raises(SerializationError, match="not for sending"):
        rpc.rpc_sync(1, answer_with_unpicklable)


@rpc.functions.async_execution
def answer_with_unpicklable():
    return answer_with(Unpicklable())


def test_early_dropped_remote_calls_to_oneself_leave_no_value_behind():
    """The handle's death is handled before the call itself arrives."""
    with LoopbackCluster(1) as cluster, cluster.on(0) as runtime:
        for _ in range(20):
            rpc.remote(0, dict)
        for _ in range(1000):  # each passes through the same threads as the calls before
            rpc.rpc_sync(0, dict)
            if not runtime.store._values:
                break
        assert not runtime.store._values


@pytest.mark.parametrize("numel", [3, 100_000])
def test_default_device_of_a_thread_does_not_matter(numel):
    """Tensors are received into host memory, whatever ``torch.device`` block the receiving thread is in."""
    with LoopbackCluster(2) as cluster, cluster.on(0), torch.device("meta"):
        host = torch.ones(numel, device="cpu")
        assert rpc.rpc_sync("worker1", torch.add, args=(host, 1)).tolist()[:2] == [2, 2]
        sparse = rpc.rpc_sync("worker1", torch.neg, args=(host.to_sparse(),))
        assert sparse.device.type == "cpu"


def test_call_that_is_refused_does_not_count_as_open(cluster, monkeypatch):
    server = cluster.runtimes[1].server

    def refuse(*_arguments):
        raise RRefError("known already")

    monkeypatch.setattr(server.store, "create", refuse)
    request = m.CallRequest(1, rref_id=RRefId(0, 1), fork_id=ForkId(0, 2))
    with pytest.raises(RRefError):
        server._on_call_request(0, SimpleNamespace(message=request))
    assert server.num_open == 0
