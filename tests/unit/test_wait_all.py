"""Unit tests for mpirpc.wait_all."""

import pytest

import mpirpc as rpc
from mpirpc.testing import LoopbackCluster

RAN = []


@pytest.fixture
def cluster():
    RAN.clear()
    with LoopbackCluster(2) as two, two.on(0):
        yield two


def note(word):
    RAN.append(word)
    return word


def fail(text):
    raise ValueError(text)


def test_all_calls_of_the_block_are_over_after_it(cluster):
    with rpc.wait_all():
        futures = [rpc.rpc_async("worker1", note, args=(n,)) for n in range(5)]
    assert all(future.done() for future in futures)
    assert sorted(RAN) == [0, 1, 2, 3, 4]


def test_calls_through_a_proxy_are_waited_for_too(cluster):
    rref = rpc.remote("worker1", list)
    with rpc.wait_all():
        future = rref.rpc_async().append(1)
    assert future.done()
    assert rref.to_here() == [1]


@rpc.wait_all()
def start_three(error=None):
    rpc.rpc_async("worker1", fail, args=("first",))
    rpc.rpc_async("worker1", fail, args=("second",))
    rpc.rpc_async("worker1", note, args=("last",))
    if error is not None:
        raise error


def test_the_first_error_is_raised_when_all_are_over(cluster):
    with pytest.raises(ValueError, match="first"):
        start_three()
    assert RAN == ["last"]


def test_the_error_of_the_block_comes_before_those_of_calls(cluster):
    with pytest.raises(KeyError):
        start_three(KeyError())
    assert RAN == ["last"]


def test_blocks_nest(cluster):
    with rpc.wait_all():
        outer = rpc.rpc_async("worker1", note, args=("outer",))
        with rpc.wait_all():
            inner = rpc.rpc_async("worker1", note, args=("inner",))
        assert inner.done()
    assert outer.done()


def test_outside_of_a_block_nothing_is_collected(cluster):
    with rpc.wait_all():
        pass
    assert rpc.rpc_async("worker1", note, args=("alone",)).wait() == "alone"
    assert getattr(cluster.runtimes[0].calls._thread, "futures", None) is None
