"""Errors that users of RPC systems met as crashes, hangs or riddles: each reaches its caller and is clear."""

import ast
import importlib
import pickle
import re
import sys

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import (
    ConfigurationError,
    NotInitializedError,
    RemoteError,
    RpcError,
    RRefError,
    SerializationError,
    UnknownWorkerError,
)
from mpirpc.testing import LoopbackCluster
from tests._ranks.launch import ROOT
from tests.unit.waiting import until

WAYS = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait(),
    "then": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).then(lambda done: done.wait()).wait(),
    "remote": lambda *args, **kwargs: rpc.remote(*args, **kwargs).to_here(),
    "proxy": lambda to, func, args=(): rpc.remote(to, Runner).rpc_sync().run(func, *args),
}


class Runner:
    def run(self, func, *args):
        return func(*args)


@pytest.fixture
def cluster():
    with LoopbackCluster(3) as made, made.on(0):
        yield made


@pytest.fixture(params=WAYS)
def call(request, cluster):
    """Each way to call; whatever went wrong in it, the callee serves on and nothing stays open."""
    yield WAYS[request.param]
    for to in (0, 1):
        assert rpc.rpc_sync(to, max, args=(1, 2)) == 2
    until(lambda: not any(runtime.server.num_open for runtime in cluster.runtimes))
    until(lambda: not any(runtime.agent.num_pending for runtime in cluster.runtimes))


def identity(x):
    return x


def fail(kind, *args):
    raise kind(*args)


# --- exceptions that end programs ---


@rpc.functions.async_execution
def fail_in_async_execution(kind):
    raise kind("in async_execution")


@rpc.functions.async_execution
def fail_behind_async_execution(kind):
    return rpc.rpc_async(0, max, args=(1, 2)).then(lambda done: fail(kind, "behind the future"))


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit], ids=lambda kind: kind.__name__
)
def test_exception_that_would_end_a_program_ends_the_call_only(call, to, kind):
    """pytorch#40437: neither the callee's thread nor the caller's program goes down with it."""
    with pytest.raises(RemoteError, match=rf"raised builtins\.{kind.__name__}"):
        call(to, fail, args=(kind, "text"))
    with pytest.raises(RemoteError, match=rf"raised builtins\.{kind.__name__}"):
        call(to, fail_in_async_execution, args=(kind,))


@pytest.mark.parametrize(
    ("kind", "arrives_as"),
    [(ValueError, ValueError), (KeyboardInterrupt, RemoteError), (SystemExit, RemoteError)],
)
def test_exception_behind_an_async_execution_future(call, kind, arrives_as):
    """pytorch#36071: the future that such a function returns may fail too."""
    if call is WAYS["proxy"]:
        pytest.skip("Runner.run is no async_execution function")
    with pytest.raises(arrives_as, match="behind the future"):
        call(1, fail_behind_async_execution, args=(kind,))


class Hostile:
    """Raises when it is pickled, or when it is rebuilt."""

    def __init__(self, kind, when_rebuilt):
        self.kind = kind
        self.when_rebuilt = when_rebuilt

    def __reduce__(self):
        if self.when_rebuilt:
            return fail, (self.kind, "when rebuilt")
        raise self.kind("when pickled")


HOSTILE = [ValueError, KeyboardInterrupt, SystemExit, RecursionError, MemoryError]


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_request_that_cannot_be_decoded(call, to, kind):
    """pytorch#30819: a failure while a request is decoded is answered like any other."""
    with pytest.raises((SerializationError, RemoteError), match=f"{kind.__name__}.*when rebuilt"):
        call(to, identity, args=([Hostile(kind, True)],))


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_result_that_cannot_be_encoded(call, to, kind):
    """pytorch#27368: a result that breaks while it is encoded is answered with what went wrong."""
    if call is WAYS["remote"] and to == 0:
        assert call(to, Hostile, args=(kind, False)).kind is kind  # it stays where it is
        return
    with pytest.raises((SerializationError, RemoteError), match=f"{kind.__name__}.*when pickled"):
        call(to, Hostile, args=(kind, False))


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_response_that_cannot_be_decoded(call, kind):
    """pytorch#27368: the error is raised where the response is waited for."""
    expected = kind if kind is KeyboardInterrupt else SerializationError  # which is what Ctrl-C would do
    with pytest.raises(expected, match="when rebuilt"):
        call(1, Hostile, args=(kind, True))


class HostileError(Exception):
    """An exception that raises when it is pickled, when it is rebuilt, and when it is shown."""

    def __init__(self, kind, when_rebuilt):
        super().__init__(kind, when_rebuilt)
        self.kind = kind
        self.when_rebuilt = when_rebuilt

    def __reduce__(self):
        return Hostile(self.kind, self.when_rebuilt).__reduce__()

    def __str__(self):
        raise self.kind("when shown")


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("when_rebuilt", [False, True])
def test_exception_that_breaks_on_its_way(call, kind, when_rebuilt):
    """pytorch#45044: whatever an exception does, the caller gets one; no crash, no hang."""
    if when_rebuilt and kind is KeyboardInterrupt:
        pytest.skip("at the caller it cannot be told from Ctrl-C")
    with pytest.raises((HostileError, RemoteError)) as caught:
        call(1, fail, args=(HostileError, kind, when_rebuilt))
    assert "HostileError" in str(caught.value.__cause__)


# --- what cannot be rebuilt ---


class WantsTwo(Exception):
    def __init__(self, first, second):
        super().__init__("one text")
        self.pair = first, second


def test_constructor_that_wants_more_than_a_text(call):
    """pytorch#87224: an exception is pickled, not made anew from its text."""
    with pytest.raises(WantsTwo, match="one text") as caught:
        call(1, fail, args=(WantsTwo, 1, 2))
    assert caught.value.pair == (1, 2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_exception_groups(call):
    """pytorch#87224: a group arrives as a group, unless one of its members cannot be rebuilt."""
    group = builtin("ExceptionGroup")
    with pytest.raises(group) as caught:
        call(1, raise_group, args=(False,))
    assert [repr(error) for error in caught.value.exceptions] == ["ValueError('text')", "KeyError('key')"]
    with pytest.raises(RemoteError, match="ExceptionGroup") as caught:
        call(1, raise_group, args=(True,))
    assert "ValueError: text" in str(caught.value.__cause__)
    assert "WantsTwo: one text" in str(caught.value.__cause__)


def builtin(name):
    return getattr(importlib.import_module("builtins"), name)


def raise_group(with_odd_one):
    second = WantsTwo(1, 2) if with_odd_one else KeyError("key")
    raise builtin("ExceptionGroup")("several", [ValueError("text"), second])


def relay(names, kind, text):
    """Pass a call on from worker to worker; the last one fails."""
    if names:
        return rpc.rpc_sync(names[0], relay, args=(names[1:], kind, text))
    raise kind(text)


def test_story_of_several_hops(cluster):
    """pytorch#73721: each worker on the way has its section, the nearest first."""
    with pytest.raises(ValueError, match="far away") as caught:
        rpc.rpc_sync(1, relay, args=(["worker2", "worker0"], ValueError, "far away"))
    story = str(caught.value.__cause__)
    places = [story.index(f"on 'worker{rank}' (rank {rank})") for rank in (1, 2, 0)]
    assert places == sorted(places)
    assert story.rstrip().endswith("ValueError: far away")


# --- what cannot travel ---


def numbers():
    yield 1
    yield 2


def coroutine():
    async def nothing():
        return None

    made = nothing()
    made.close()
    return made


@pytest.mark.parametrize(
    ("make", "kind"), [(numbers, "generator"), (coroutine, "coroutine"), (sys._getframe, "frame")]
)
def test_generator_as_result(call, make, kind):
    """pytorch#42705: it is named in the error; nothing is consumed or guessed."""
    with pytest.raises(SerializationError, match=rf"cannot send .*{kind}"):
        call(1, make)


def test_generator_as_argument(call):
    """pytorch#42705: likewise, and nothing is sent."""
    with pytest.raises(SerializationError, match=r"cannot send .*generator"):
        call(1, list, args=(numbers(),))


def test_builtin_with_keywords(cluster):
    """pytorch#28786: builtins are called like all other functions, with any of their keywords."""
    made = rpc.rpc_sync(1, torch.ones, args=(2, 3), kwargs={"requires_grad": True, "dtype": torch.float64})
    assert (made.shape, made.dtype, made.requires_grad) == ((2, 3), torch.float64, True)


# --- advice ---


def test_advice_of_errors_helps(cluster):
    """pytorch#25971: whoever does what an error says comes through."""
    with pytest.raises(UnknownWorkerError) as caught:
        rpc.rpc_sync("trainer", max, args=(1, 2))
    name = re.search(r"known workers: .*'(worker1)' \(rank 1\)", str(caught.value))[1]
    assert rpc.rpc_sync(name, max, args=(1, 2)) == 2

    rref = rpc.remote(1, list, args=((1, 2),))
    with pytest.raises(RRefError, match=r"hint: use to_here\(\) to copy the value, or rpc_sync\(\) to run"):
        rref.local_value()
    assert (rref.to_here(), rref.rpc_sync().index(2)) == ([1, 2], 1)

    with pytest.raises(RRefError, match="hint: pass it as an argument or a result of rpc_sync"):
        pickle.dumps(rref)
    assert rpc.rpc_sync(1, rpc.RRef.to_here, args=(rref,)) == [1, 2]


def package_texts():
    """Every string of the package that is no docstring, with its place."""
    for path in sorted((ROOT / "mpirpc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n\n" not in node.value:
                yield f"{path.name}:{node.lineno}", node.value


def test_what_errors_advise_exists():
    """pytorch#25971: names of ours in a text can be looked up, as they stand there."""
    missing, found = [], 0
    for place, text in package_texts():
        for name in re.findall(r"\bmpirpc\.((?!_)[A-Za-z_.]+[A-Za-z_])", text):
            if any(part.startswith("_") for part in name.split(".")):
                continue
            found += 1
            if not is_public(name.removesuffix(".py")):
                missing.append(f"{place}: mpirpc.{name}")
    assert found > 3
    assert missing == []


LOGGERS = {"agent", "call", "executor", "progress", "rref", "runtime", "transport"}
"""Names of the library's loggers begin with its name too."""


def is_public(name):
    if name in LOGGERS:
        return True
    found = rpc
    for part in name.split("."):
        if not hasattr(found, part):
            try:
                importlib.import_module(f"mpirpc.{name}")
            except ImportError:
                return False
            return True
        found = getattr(found, part)
    return True


# --- start ---


def test_failed_init_is_an_exception(monkeypatch):
    """pytorch#54266: no crash where a device is missing, and RPC can be started afterwards."""
    with pytest.raises(ConfigurationError, match="is not a device"):
        rpc.MPIRpcBackendOptions().set_device_map("worker1", {"cuda:0": "no such device"})
    with pytest.raises(NotInitializedError) as caught:
        rpc.get_worker_info()
    assert isinstance(caught.value, RpcError)
