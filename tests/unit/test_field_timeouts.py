"""Time limits as users expected them: kept at the caller, for whatever is waited for; nothing is lost."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import ConfigurationError, RpcTimeoutError
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0

gate = threading.Event()
entered = threading.Event()
built = threading.Event()


@pytest.fixture(autouse=True)
def closed_gate():
    for event in (gate, entered, built):
        event.clear()
    yield
    gate.set()


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made
        gate.set()
        made.network.release_all()


class Slow:
    """A value whose making waits for the gate."""

    def __init__(self):
        entered.set()
        assert gate.wait(LIMIT)
        built.set()

    def hello(self):
        return "hello"


def wait_for_the_gate(result=None):
    entered.set()
    assert gate.wait(LIMIT)
    return result


def wait_and_share():
    wait_for_the_gate()
    return rpc.RRef(torch.ones(3))


def test_future_is_waited_for_with_a_limit(cluster):
    """pytorch#39280: the wait ends, the call goes on, and its result can still be had."""
    future = rpc.rpc_async(1, wait_for_the_gate, args=(5,))
    for waited in (future, future.then(lambda done: done.wait())):
        with pytest.raises(RpcTimeoutError, match=r"longer than 0\.01 s") as caught:
            waited.wait(timeout=0.01)
        assert caught.value.timeout == 0.01
    assert rpc.debug_info()["pending_calls"] == 1
    gate.set()
    assert (future.wait(timeout=LIMIT), future.wait()) == (5, 5)


def test_limit_of_the_call_ends_a_longer_wait(cluster):
    """pytorch#39280: whichever limit comes first."""
    future = rpc.rpc_async(1, wait_for_the_gate, timeout=0.01)
    with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout"):
        future.wait(timeout=LIMIT)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_limit_must_be_a_time(cluster, timeout):
    """pytorch#39280: a limit that means nothing is refused."""
    with pytest.raises(ConfigurationError, match="is not a time limit"):
        rpc.rpc_async(1, max, args=(1, 2)).wait(timeout=timeout)


def test_silent_callee(cluster):
    """pytorch#25531: limits run at the caller; the other side does not even know of the call."""
    cluster.network.hold()
    rref = rpc.remote(1, list, timeout=0)
    uses = {
        "rpc_sync": lambda: rpc.rpc_sync(1, max, args=(1, 2), timeout=0.01),
        "rpc_async": lambda: rpc.rpc_async(1, max, args=(1, 2), timeout=0.01).wait(),
        "to_here": lambda: rref.to_here(timeout=0.01),
        "proxy": lambda: rref.rpc_sync(timeout=0.01).copy(),
        "async proxy": lambda: rref.rpc_async(timeout=0.01).copy().wait(),
        "barrier": lambda: rpc.barrier(timeout=0.01),
    }
    for use in uses.values():
        with pytest.raises(RpcTimeoutError):
            use()


@pytest.mark.parametrize("owner", [0, 1])
def test_proxies_of_a_value_that_takes_long(cluster, owner):
    """pytorch#50499: their limits hold also while the value is being made, at its owner and elsewhere."""
    rref = rpc.remote(owner, Slow)
    assert entered.wait(LIMIT)
    for use in (
        lambda: rref.to_here(timeout=0.01),
        lambda: rref.rpc_sync(timeout=0.01).hello(),
        lambda: rref.rpc_async(timeout=0.01).hello().wait(),
    ):
        with pytest.raises(RpcTimeoutError):
            use()
    gate.set()
    assert rref.rpc_sync().hello() == "hello"


def test_remote_that_takes_too_long_tells_whoever_uses_it(cluster):
    """pytorch#33803: there is nobody else to tell; and the process lives."""
    rref = rpc.remote(1, Slow, timeout=0.01)
    assert entered.wait(LIMIT)
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.05)
    with pytest.raises(RpcTimeoutError, match=r"RRef creation via remote\(\) timed out"):
        rref.to_here()
    gate.set()
    assert built.wait(LIMIT)
    assert rpc.rpc_sync(1, max, args=(1, 2)) == 2


def test_late_rref_is_let_go(cluster):
    """pytorch#27020: the response of a call that timed out is dropped, and what it carried with it."""
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(1, wait_and_share, timeout=0.01)
    gate.set()
    info = cluster.runtimes[1].debug_info
    while info()["owned_rrefs"] or info()["open_calls"] or info()["calls_served"] == 0:
        rpc.rpc_sync(1, max, args=(1, 2))  # each passes through the threads that let it go
