"""Unit tests for mpirpc._core.agent: requests find responses, deadlines end them, strangers are refused."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc._core import messages as m
from mpirpc._core.agent import WorkerInfo, name_of, seconds_left
from mpirpc._core.messages import Body, RRefId
from mpirpc._core.transport import Arrival
from mpirpc.errors import ConfigurationError, NotInitializedError, RpcTimeoutError, UnknownWorkerError
from mpirpc.testing import LoopbackCluster
from tests.unit.waiting import until


@pytest.fixture
def cluster():
    with LoopbackCluster(3) as made:
        yield made


@pytest.fixture
def rough_cluster():
    """For tests that lose messages or make them up: such a group cannot end gracefully."""
    made = LoopbackCluster(3)
    yield made
    made.shutdown(graceful=False)


def wait_until_held(cluster, count):
    """A message may leave on the thread that polls: a moment after the call."""
    until(lambda: len(cluster.network.held) >= count)


# --- workers ---


def test_workers_are_found_by_name_rank_and_info(cluster):
    agent = cluster.runtimes[0].agent
    info = WorkerInfo("worker2", 2)
    assert {agent.find_worker(to) for to in ("worker2", 2, info)} == {info}
    assert agent.me == WorkerInfo("worker0", 0)
    assert agent.describe(1) == "'worker1' (rank 1)"


@pytest.mark.parametrize("to", ["x", "", -1, 3, True, None, 1.0, [], WorkerInfo("worker1", 2)], ids=repr)
def test_unknown_workers(cluster, to):
    with pytest.raises(
        UnknownWorkerError, match=r"'worker0' \(rank 0\) called unknown worker .*'worker2' \(rank 2\)"
    ):
        cluster.runtimes[0].agent.find_worker(to)


def test_long_lists_of_workers_are_cut():
    with LoopbackCluster(20) as cluster, pytest.raises(UnknownWorkerError, match="and 4 more") as caught:
        cluster.runtimes[0].agent.find_worker("x")
    assert "worker16" not in str(caught.value)


def test_worker_info_shows_itself():
    info = WorkerInfo("a", 1)
    assert (repr(info), str(info)) == ("WorkerInfo(id=1, name=a)", "'a' (rank 1)")


@pytest.mark.parametrize("name", ["", " ", "abc*", "a" * 128, 5])
def test_worker_info_refuses_names_that_no_worker_can_have(name):
    with pytest.raises(ConfigurationError, match=r"the name .* is not allowed: 1 to 127 letters"):
        WorkerInfo(name, 0)


# --- requests ---


def test_responses_may_come_in_any_order(cluster):
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: source == 0)
        futures = [rpc.rpc_async("worker1", max, args=(i, 0)) for i in range(5)]
        wait_until_held(cluster, 5)
        for place in reversed(range(5)):
            cluster.network.release(place)
        assert [future.wait() for future in futures] == list(range(5))
        cluster.network.release_all()


def test_lost_request_ends_at_its_deadline(rough_cluster):
    with rough_cluster.on(0):
        rough_cluster.network.drop(lambda source, dest, head: True)
        with pytest.raises(
            RpcTimeoutError, match=r"set timeout \(0\.01 s\).*'worker1' \(rank 1\).*builtins\.max"
        ):
            rpc.rpc_sync("worker1", max, args=(1, 2), timeout=0.01)
        assert rpc.debug_info()["pending_calls"] == 0


def test_deadline_passes_though_nobody_waits(rough_cluster):
    with rough_cluster.on(0) as runtime:
        rough_cluster.network.drop(lambda source, dest, head: True)
        slow = rpc.rpc_async("worker1", max, args=(1, 2), timeout=100)
        late = [rpc.rpc_async("worker1", max, args=(1, 2), timeout=0.01 * i) for i in (3, 1, 2)]
        for future in late:
            with pytest.raises(RpcTimeoutError):
                future.wait()
        assert runtime.agent.num_pending == 1
        assert not slow.done()


def test_message_tells_how_much_else_is_pending(rough_cluster):
    with rough_cluster.on(0):
        rough_cluster.network.drop(lambda source, dest, head: True)
        kept = [rpc.rpc_async("worker1", max, args=(1, 2), timeout=100) for _ in range(2)]
        with pytest.raises(RpcTimeoutError, match="2 more requests to it are pending"):
            rpc.rpc_sync("worker1", max, args=(1, 2), timeout=0.01)
        assert len(kept) == 2


def test_late_response_is_dropped(cluster):
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: dest == 0)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", max, args=(1, 2), timeout=0.01)
        cluster.network.release_all()
        assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2


def test_request_of_nobody_is_answered_by_the_wrong_worker(rough_cluster, caplog):
    """worker2 answers what worker1 was asked: refused, and the true answer still counts."""
    network = rough_cluster.network
    with rough_cluster.on(0) as runtime:
        network.hold(lambda source, dest, head: source == 0)
        future = rpc.rpc_async("worker1", max, args=(1, 2))
        (request_id,) = runtime.agent._pending
        rough_cluster.runtimes[2].agent.send(0, m.CallResponse(request_id), Body(b"x"))
        rough_cluster.runtimes[2].agent.send(0, m.ForkAccept(m.ForkId(0, 99)))
        network.release_all()
        assert future.wait() == 2
        while "unknown fork 0.99" not in caplog.text:
            rpc.rpc_sync("worker1", max, args=(1, 2))
    assert "'worker2' (rank 2) answered request" in caplog.text


@pytest.mark.parametrize("head", [b"", b"garbage", b"\x01\x52\xff" + b"\0" * 40, b"\x01\x52\x01"], ids=repr)
def test_damaged_message_is_refused_and_the_worker_lives_on(rough_cluster, caplog, head):
    with rough_cluster.on(0) as runtime:
        rough_cluster.network.carry(0, Arrival(1, bytearray(head), []))
        assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
        while runtime.transport.stats().messages_received < 2:
            rpc.rpc_sync("worker1", max, args=(1, 2))
    assert "a message was refused: source='worker1' (rank 1)" in caplog.text


# --- the end ---


def test_pending_requests_fail_at_the_end(rough_cluster):
    rough_cluster.network.hold()
    with rough_cluster.on(0) as runtime:
        future = rpc.rpc_async("worker1", max, args=(1, 2))
        runtime.shutdown(graceful=False, timeout=0)
        with pytest.raises(NotInitializedError, match=r"pending when mpirpc\.shutdown was called"):
            future.wait()
        with pytest.raises(
            NotInitializedError, match=r"no call can be made any more: mpirpc\.shutdown was called"
        ):
            rpc.rpc_sync("worker1", max, args=(1, 2))
        assert runtime.agent.is_closed


def test_quiet_when_nothing_happens(cluster):
    agent = cluster.runtimes[0].agent
    assert agent.is_quiet()
    with cluster.on(0):
        cluster.network.hold()
        future = rpc.rpc_async("worker1", max, args=(1, 2))
        assert not agent.is_quiet()
        cluster.network.release_all()
        future.wait()


_entered, _gate = threading.Event(), threading.Event()


class SlowToRebuild:
    """Rebuilding it takes until the gate opens."""

    def __reduce__(self):
        return _rebuild, ()


def _rebuild():
    _entered.set()
    assert _gate.wait(30)
    return "rebuilt"


def test_not_quiet_while_what_came_is_being_handled(cluster):
    """Nothing is pending any more, and nothing of it shows anywhere else: shutdown must wait all the same."""
    runtime = cluster.runtimes[0]
    _entered.clear()
    _gate.clear()
    with cluster.on(0):
        future = rpc.rpc_async("worker1", SlowToRebuild)
        assert _entered.wait(30)
        with runtime.agent.engine.stopped():
            assert runtime.transport.stats().messages_received == 1
            assert runtime.agent.num_pending == 0
            assert not runtime.agent.is_quiet()
        _gate.set()
        assert future.wait() == "rebuilt"
        until(runtime.agent.is_quiet)


def test_limit_on_bytes_under_way_makes_callers_wait(cluster, monkeypatch):
    """The transport says that too much is under way, until it has been asked a few times."""
    with cluster.on(0) as runtime:
        answers = iter([1 << 30] * 5)
        monkeypatch.setattr(runtime.transport, "unfinished_nbytes", lambda dest: next(answers, 0))
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
        assert next(answers, None) is None


def test_names_of_functions():
    assert name_of(max) == "builtins.max"
    assert name_of(LoopbackCluster.on) == "mpirpc.testing.LoopbackCluster.on"
    assert name_of(RRefId(1, 2)) == "to_here of rref 1.2"


def test_seconds_left_is_never_negative():
    assert seconds_left(0.0) == 0.0
    assert seconds_left(float("inf")) == float("inf")
