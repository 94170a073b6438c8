"""Unit tests for mpirpc.api: the thin cover checks its arguments and finds the current runtime. No MPI."""

import re

import pytest

import mpirpc as rpc
from mpirpc import api
from mpirpc._core.agent import WorkerInfo
from mpirpc._core.current import get_current_or_none
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc.backend_registry import _Backends, register_backend
from mpirpc.errors import ConfigurationError, NotInitializedError, UnknownWorkerError
from mpirpc.testing import LoopbackCluster


def keywords(*args, **kwargs):
    return args, kwargs


def init_alone(name, rank, world_size, options):
    """A group of one, in memory."""
    return Runtime(LoopbackTransport(LoopbackNetwork(1), 0), [WorkerInfo(name or "alone", 0)], options)


@pytest.fixture
def alone(monkeypatch):
    """A backend for groups of one; the test's group is ended."""
    monkeypatch.setattr(_Backends, "_registered", dict(_Backends._registered))
    yield register_backend("ALONE", rpc.MPIRpcBackendOptions, init_alone)
    rpc.shutdown(graceful=False)


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


WAYS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


def result_of(way, *args, **kwargs):
    made = way(*args, **kwargs)
    return made.to_here() if way is rpc.remote else made.wait() if way is rpc.rpc_async else made


# --- the group of the process ---


def test_init_call_shutdown_and_again(alone):
    for name in ("first", "second"):
        rpc.init_rpc(name, backend=alone)
        assert rpc.get_worker_info() == WorkerInfo(name, 0)
        assert rpc.rpc_sync(name, max, args=(1, 2)) == 2
        rpc.shutdown()
        assert get_current_or_none() is None


def test_init_twice_is_refused(alone):
    rpc.init_rpc("a", backend=alone)
    with pytest.raises(
        ConfigurationError, match=r"(?s)already initialized: 'a' \(rank 0\).*hint: call .*shutdown"
    ):
        rpc.init_rpc("b", backend=alone)


@pytest.mark.parametrize("backend", ["ALONE", "MPI", 5], ids=repr)
def test_backend_must_be_one(alone, backend):
    with pytest.raises(ConfigurationError, match="must be a BackendType"):
        rpc.init_rpc("a", backend=backend)


def test_options_reach_the_group(alone):
    rpc.init_rpc("a", backend=alone, rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=7))
    assert get_current_or_none().options.rpc_timeout == 7


def test_failed_init_leaves_nothing(alone, monkeypatch):
    def fail(*args):
        raise ConfigurationError("no")

    monkeypatch.setattr(api, "init_backend", fail)
    with pytest.raises(ConfigurationError, match="no"):
        rpc.init_rpc("a", backend=alone)
    assert get_current_or_none() is None


def test_shutdown_without_a_group_does_nothing():
    rpc.shutdown()
    rpc.shutdown(graceful=False)


def test_after_shutdown_the_reason_is_told(alone):
    rpc.init_rpc("a", backend=alone)
    rpc.shutdown()
    with pytest.raises(NotInitializedError, match="hint: RPC was shut down"):
        rpc.get_worker_info()


def test_program_that_forgets_to_shut_down_is_warned(alone):
    rpc.init_rpc("a", backend=alone)
    with pytest.warns(RuntimeWarning, match=r"'a' \(rank 0\) ends without mpirpc\.shutdown"):
        api._stop_at_exit()
    assert get_current_or_none() is None
    api._stop_at_exit()


def test_available():
    assert rpc.is_available()


# --- calls ---


@pytest.mark.parametrize("way", WAYS)
def test_arguments_may_be_left_out_or_lists(cluster, way):
    assert result_of(way, 1, keywords) == ((), {})
    assert result_of(way, 1, keywords, [1, 2], {"a": 3}) == ((1, 2), {"a": 3})
    assert result_of(way, 1, keywords, kwargs={"a": 3}) == ((), {"a": 3})


@pytest.mark.parametrize("way", WAYS)
def test_callee_by_name_rank_and_info(cluster, way):
    for to in ("worker1", 1, rpc.get_worker_info(1)):
        assert result_of(way, to, rpc.get_worker_info).id == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("timeout", [-2, -0.5, float("nan")])
def test_timeouts_out_of_range(cluster, way, timeout):
    with pytest.raises(ConfigurationError, match=r"timeout=.* is not a time limit"):
        way(1, max, args=(1, 2), timeout=timeout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("timeout", [0, 30, 30.5, float("inf")])
def test_timeouts_in_range(cluster, way, timeout):
    assert result_of(way, 1, max, (1, 2), timeout=timeout) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("func", [None, "max", 5], ids=repr)
def test_function_must_be_callable(cluster, way, func):
    with pytest.raises(TypeError, match="function should be callable"):
        way(1, func)


@pytest.mark.parametrize("way", WAYS)
def test_unknown_worker(cluster, way):
    with pytest.raises(UnknownWorkerError, match="unknown worker 'x'"):
        way("x", max, args=(1, 2))


@pytest.mark.parametrize("way", WAYS)
def test_without_a_group(way):
    with pytest.raises(NotInitializedError, match="RPC has not been initialized"):
        way("worker0", max, args=(1, 2))


# --- looking in ---


def test_worker_info(cluster):
    assert rpc.get_worker_info() == rpc.get_worker_info("worker0") == rpc.get_worker_info(0)
    assert rpc.get_worker_info(rpc.WorkerInfo("worker1", 1)).name == "worker1"
    with pytest.raises(UnknownWorkerError):
        rpc.get_worker_info("x")


def test_debug_info_has_the_keys_that_are_documented(cluster):
    documented = set(re.findall(r"``(\w+)``", rpc.debug_info.__doc__)) - {"init_rpc", "gil_wait_us"}
    assert documented >= {name for name in rpc.debug_info() if not name.startswith("autograd_")}
    assert set(rpc.debug_info()) >= documented
