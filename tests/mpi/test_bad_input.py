"""What a user may get wrong: each is a clear typed error at the caller, and the job goes on as before."""

import pickle
import sys
import time
import types

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import (
    ConfigurationError,
    LocalProtocolError,
    NotInitializedError,
    RemoteError,
    RemoteTraceback,
    RRefError,
    SerializationError,
    UnknownWorkerError,
)

CALLEE = r"'worker1' \(rank 1\)"


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not for sending")

    def __repr__(self):
        return "<the unpicklable one>"


def fail(kind, *args):
    raise kind(*args)


def fail_locally():
    class Local(Exception):
        pass

    raise Local("only here")


def make_unpicklable():
    return Unpicklable()


def end_the_callee():
    sys.exit(3)


def identity(x):
    return x


def shut_down():
    rpc.shutdown()


WAYS = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait(),
    "remote": lambda *args, **kwargs: rpc.remote(*args, **kwargs).to_here(),
}


@pytest.fixture(params=WAYS)
def call(request, rpc_world):
    """One of the three ways to call; afterwards a good call must work and nothing be pending."""
    yield WAYS[request.param]
    if rpc_world.rank == 0:
        assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
        # an owner may answer a fetch before it confirms the RRef; should nothing come, the watchdog ends it
        while rpc.debug_info()["pending_calls"]:
            time.sleep(0.001)


# --- who ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "to",
    ["worker99", "", -1, 99, True, None, 1.0, rpc.WorkerInfo("worker1", 0), rpc.WorkerInfo("x", 1)],
    ids=repr,
)
def test_unknown_worker(rpc_world, call, to):
    if rpc_world.rank == 0:
        story = rf"'worker0' \(rank 0\) called unknown worker .*{CALLEE}"
        with pytest.raises(UnknownWorkerError, match=story):
            call(to, max, args=(1, 2))
        with pytest.raises(ValueError, match="unknown worker"):
            rpc.get_worker_info(to) if to is not None else call(to, max)


# --- what ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("func", [None, "max", 5], ids=repr)
def test_not_a_function(rpc_world, call, func):
    if rpc_world.rank == 0:
        with pytest.raises(TypeError, match="should be callable"):
            call("worker1", func)


@pytest.mark.mpi(min_size=2)
def test_function_that_the_callee_lacks(rpc_world, call):
    if rpc_world.rank == 0:
        module = types.ModuleType("a_module_of_rank_0")
        exec("def func(): pass", module.__dict__)
        sys.modules["a_module_of_rank_0"] = module
        story = r"(?s)cannot rebuild .*a_module_of_rank_0.*importable"
        with pytest.raises(SerializationError, match=story) as caught:
            call("worker1", module.func)
        del sys.modules["a_module_of_rank_0"]
        assert "'worker1' (rank 1)" in str(caught.value.__cause__)


@pytest.mark.mpi(min_size=2)
def test_argument_that_cannot_be_pickled(rpc_world, call):
    if rpc_world.rank == 0:
        with pytest.raises(SerializationError, match=r"cannot send .*<the unpicklable one>.*not for"):
            call("worker1", identity, args=([Unpicklable()],))


@pytest.mark.mpi(min_size=2)
def test_result_that_cannot_be_pickled(rpc_world, call):
    if rpc_world.rank == 0:
        with pytest.raises(SerializationError, match="cannot send <the unpicklable one>") as caught:
            call("worker1", make_unpicklable)
        assert "'worker1' (rank 1)" in str(caught.value.__cause__)


@pytest.mark.mpi(min_size=2)
def test_wrong_number_of_arguments(rpc_world, call):
    if rpc_world.rank == 0:
        with pytest.raises(TypeError, match="identity"):
            call("worker1", identity, args=(1, 2))


# --- callees that raise ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (ValueError, ("text",)),
        (KeyError, ("key",)),
        (OSError, (2, "No such file")),
        (TwoArguments, (404, "gone")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_exception_comes_as_itself_with_the_story(rpc_world, call, kind, args):
    if rpc_world.rank == 0:
        with pytest.raises(kind) as caught:
            call("worker1", fail, args=(kind, *args))
        assert str(caught.value) == str(kind(*args))
        assert vars(caught.value) == vars(kind(*args))
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        story = str(caught.value.__cause__)
        assert "on 'worker1' (rank 1)" in story
        assert "raise kind(*args)" in story


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("func", "name"), [(fail_locally, "Local"), (end_the_callee, "SystemExit")])
def test_exception_that_cannot_come_as_itself(rpc_world, call, func, name):
    if rpc_world.rank == 0:
        with pytest.raises(RemoteError, match=rf"{CALLEE} raised .*{name}"):
            call("worker1", func)


# --- options and state ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("timeout", [-2, -0.5, float("nan")])
def test_timeout_out_of_range(rpc_world, call, timeout):
    if rpc_world.rank == 0:
        with pytest.raises(ConfigurationError, match=r"timeout=.* is not a time limit"):
            call("worker1", max, args=(1, 2), timeout=timeout)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("timeout", [-2, float("nan")])
def test_timeout_out_of_range_at_an_rref(rpc_world, timeout):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", list)
        for use in (
            lambda: rref.to_here(timeout=timeout),
            lambda: rref.rpc_sync(timeout=timeout).copy(),
            lambda: rref.rpc_async(timeout=timeout).copy(),
            lambda: rref.remote(timeout=timeout).copy(),
        ):
            with pytest.raises(ConfigurationError, match=r"timeout=.* is not a time limit"):
                use()


@pytest.mark.mpi(min_size=2)
def test_local_value_on_a_non_owner(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", list)
        with pytest.raises(RRefError, match=CALLEE):
            rref.local_value()
        assert rref.to_here() == []


@pytest.mark.mpi(min_size=2)
def test_rref_pickled_outside_a_call(rpc_world):
    rref = rpc.RRef(1)
    with pytest.raises(RRefError, match="outside of a call"):
        pickle.dumps(rref)
    assert rref.to_here() == 1


@pytest.mark.mpi(min_size=2)
def test_init_while_running(rpc_world):
    with pytest.raises(ConfigurationError, match=rf"already initialized: '{rpc_world.name}'"):
        rpc.init_rpc("again")
    assert rpc.get_worker_info().name == rpc_world.name


@pytest.mark.mpi(min_size=2)
def test_shutdown_inside_a_call(rpc_world):
    if rpc_world.rank == 0:
        with pytest.raises(LocalProtocolError, match="runs as a call"):
            rpc.rpc_sync("worker1", shut_down)
        assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    "use",
    [
        lambda: rpc.rpc_sync("worker0", max, args=(1, 2)),
        lambda: rpc.rpc_async("worker0", max, args=(1, 2)),
        lambda: rpc.remote("worker0", max, args=(1, 2)),
        lambda: rpc.RRef(1),
        lambda: rpc.get_worker_info(),
        lambda: rpc.debug_info(),
    ],
    ids=["rpc_sync", "rpc_async", "remote", "RRef", "get_worker_info", "debug_info"],
)
def test_use_before_init(use):
    with pytest.raises(NotInitializedError, match="init_rpc"):
        use()


@pytest.mark.mpi(min_size=2)
def test_use_after_shutdown(rpc_world):
    rref = rpc.remote("worker1", torch.ones, args=(1,))
    future = rpc.rpc_async("worker1", max, args=(1, 2))
    future.wait()
    rpc.shutdown()
    assert future.wait() == 2
    with pytest.raises(NotInitializedError, match="shut down"):
        rpc.rpc_sync("worker0", max, args=(1, 2))
    uses = [rref.rpc_sync().sum, rref.rpc_async().sum, rref.remote().sum, lambda: rpc.RRef(1)]
    for use in uses if rref.is_owner() else [rref.to_here, *uses]:  # its owner still has the value
        with pytest.raises(NotInitializedError, match=r"shut ?down"):
            use()
