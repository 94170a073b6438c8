"""Unit tests for mpirpc._core.profiling and profiler_hooks: calls in profiles, and what they run."""

import json

import pytest
import torch
from torch.autograd.profiler_legacy import profile as legacy_profile
from torch.profiler import ProfilerActivity
from torch.profiler import profile as kineto_profile

import mpirpc as rpc
from mpirpc._core import profiling
from mpirpc.functions import async_execution
from mpirpc.profiler import measure_gil_wait, profile_served_calls
from mpirpc.testing import LoopbackCluster


def multiply(a, b):
    return torch.relu(a * b)


def multiply_elsewhere(to, a, b):
    return rpc.rpc_sync(to, multiply, args=(a, b))


@async_execution
def multiply_later(to, a, b):
    return rpc.rpc_async(to, multiply, args=(a, b)).then(lambda done: done.wait() + 1)


def fail():
    raise ValueError("told")


class Box:
    def __init__(self, value):
        self.value = value

    def times(self, factor):
        return self.value * factor


@pytest.fixture
def cluster():
    with LoopbackCluster(3) as made, made.on(0):
        yield made


def legacy(**settings):
    return legacy_profile(**settings)


def kineto(**settings):
    return kineto_profile(activities=[ProfilerActivity.CPU], **settings)


def events_of(profile):
    return list(profile.function_events if isinstance(profile, legacy_profile) else profile.events())


def find(events, name):
    found = [event for event in events if event.name == name]
    assert len(found) == 1, [event.name for event in events]
    return found[0]


PAIR = torch.ones(3), torch.full((3,), 2.0)

both = pytest.mark.parametrize("make", [legacy, kineto])


@both
def test_call_and_what_it_runs_show_at_the_caller(cluster, make):
    with make() as profile:
        rpc.rpc_sync("worker1", multiply, args=PAIR)
    events = events_of(profile)
    call = find(events, "rpc_sync#multiply(worker0 -> worker1)")
    assert (call.node_id, call.is_remote) == (0, False)
    for name in ("aten::mul", "aten::relu"):
        ran = find(events, f"{call.name}#remote_op: {name}")
        assert (ran.node_id, ran.is_remote) == (1, True)
        assert call.time_range.start <= ran.time_range.start <= ran.time_range.end <= call.time_range.end


@both
@pytest.mark.parametrize("mode", ["async", "remote"])
def test_other_modes(cluster, make, mode):
    with make() as profile:
        if mode == "async":
            assert rpc.rpc_async("worker1", multiply, args=PAIR).wait().tolist() == [2, 2, 2]
        else:
            rref = rpc.remote("worker1", multiply, args=PAIR)
            cluster.runtimes[0].agent.wait(rref._creation)
            assert rref.to_here().tolist() == [2, 2, 2]
    find(events_of(profile), f"rpc_{mode}#multiply(worker0 -> worker1)#remote_op: aten::mul")
    assert any("aten::mul" in row.key for row in profile.key_averages())


@both
def test_many_at_once_keep_apart(cluster, make):
    with make() as profile:
        futures = [rpc.rpc_async(1 + i % 2, multiply, args=PAIR) for i in range(20)]
        assert all(future.wait().tolist() == [2, 2, 2] for future in futures)
    names = [event.name for event in events_of(profile)]
    for worker in ("worker1", "worker2"):
        assert names.count(f"rpc_async#multiply(worker0 -> {worker})") == 10
        assert names.count(f"rpc_async#multiply(worker0 -> {worker})#remote_op: aten::relu") == 10


def test_nested_calls_show_hop_by_hop(cluster):
    with legacy() as profile:
        rpc.rpc_sync("worker1", multiply_elsewhere, args=("worker2", *PAIR))
    outer = "rpc_sync#multiply_elsewhere(worker0 -> worker1)"
    inner = f"{outer}#remote_op: rpc_sync#multiply(worker1 -> worker2)"
    events = events_of(profile)
    assert find(events, inner).node_id == 1
    assert find(events, f"{inner}#remote_op: aten::mul").node_id == 2


def test_call_that_answers_later(cluster):
    """The call made by an ``async_execution`` function ends after the function."""
    with legacy() as profile:
        assert rpc.rpc_sync("worker1", multiply_later, args=("worker2", *PAIR)).tolist() == [3, 3, 3]
    inner = "rpc_sync#multiply_later(worker0 -> worker1)#remote_op: rpc_async#multiply(worker1 -> worker2)"
    events = events_of(profile)
    assert find(events, inner).node_id == 1
    assert find(events, f"{inner}#remote_op: aten::mul").node_id == 2


def test_method_of_a_value(cluster):
    rref = rpc.remote("worker1", Box, args=(torch.ones(2),))
    with legacy() as profile:
        assert rref.rpc_sync().times(3).tolist() == [3, 3]
    find(events_of(profile), "rpc_sync#times(worker0 -> worker1)#remote_op: aten::mul")


def test_failed_call_shows_and_raises(cluster):
    with legacy() as profile, pytest.raises(ValueError, match="told"):
        rpc.rpc_sync("worker1", fail)
    find(events_of(profile), "rpc_sync#fail(worker0 -> worker1)")


@both
@pytest.mark.parametrize("wanted", [False, True])
def test_shapes_and_memory_only_where_asked_for(cluster, make, wanted):
    with make(record_shapes=wanted, profile_memory=wanted) as profile:
        rpc.rpc_sync("worker1", multiply, args=PAIR)
    event = find(events_of(profile), "rpc_sync#multiply(worker0 -> worker1)#remote_op: aten::mul")
    assert bool(event.input_shapes) == wanted
    assert [[3], [3]] == event.input_shapes[:2] or not wanted
    assert (event.cpu_memory_usage > 0) == wanted


@both
def test_chrome_trace(cluster, make, tmp_path):
    with make() as profile:
        rpc.rpc_async("worker1", multiply, args=PAIR).wait()
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    call = [event for event in events if event["name"] == "rpc_async#multiply(worker0 -> worker1)"]
    ran = [event for event in events if event["name"].endswith("aten::mul")]
    assert len(call) == len(ran) == 1
    assert call[0]["ts"] <= ran[0]["ts"]
    assert ran[0]["ts"] + ran[0]["dur"] <= call[0]["ts"] + call[0]["dur"] + 1e-3


def test_profile_without_calls_is_left_alone(cluster):
    with kineto() as profile:
        torch.ones(2) + 1
    assert all(not event.is_remote for event in profile.events())


def test_autograd_pass_shows(cluster):
    with rpc.autograd.context() as context_id:
        a = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("worker1", multiply, args=(a, a)).sum()
        with kineto() as profile:
            rpc.autograd.backward(context_id, [loss])
    events = events_of(profile)
    whole = find(events, "torch::distributed::autograd::backward")
    for name in ("SendRpcBackward", "RecvRpcBackward"):
        assert any(event.name.endswith(name) for event in events)
    assert all(whole.time_range.start <= event.time_range.start for event in events if "Rpc" in event.name)


def add_in_a_profile(make):
    with make() as profile:
        torch.ones(2) + 1
    return [event.name for event in events_of(profile)]


@pytest.mark.parametrize(("make", "inner"), [(legacy, legacy), (legacy, kineto), (kineto, legacy)])
def test_function_that_profiles_itself_is_not_disturbed(cluster, make, inner):
    """torch has room for one profile in a thread (of kineto, in a process): the function's own wins."""
    with make() as profile:
        assert "aten::add" in rpc.rpc_sync("worker1", add_in_a_profile, args=(inner,))
    find(events_of(profile), "rpc_sync#add_in_a_profile(worker0 -> worker1)")


def test_nobody_else_is_profiled(cluster):
    """Only the call itself is: the thread that ran it is free afterwards."""
    with legacy():
        assert rpc.rpc_sync("worker1", profiling.is_profiling) is True
    assert rpc.rpc_sync("worker1", profiling.is_profiling) is False


def test_served_calls(cluster):
    """A server sees what its clients make it run; blocks may overlap."""
    with cluster.on(1):
        outer, inner = profile_served_calls(), profile_served_calls()
        outer.__enter__()
    rpc.rpc_sync("worker1", torch.add, args=PAIR)
    with cluster.on(1):
        inner.__enter__()
    rpc.rpc_sync("worker1", torch.sub, args=PAIR)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    rpc.rpc_sync("worker1", torch.mul, args=PAIR)
    assert [[event.name for event in call] for call in inner.calls] == [["aten::sub"]]
    assert [[event.name for event in call] for call in outer.calls] == [["aten::add"], ["aten::sub"]]
    for _ in range(2):
        assert {row.key for row in outer.key_averages()} == {"aten::add", "aten::sub"}


def test_served_calls_keep_apart_and_show_calls_of_their_own(cluster):
    with cluster.on(1):
        profile = profile_served_calls().__enter__()
    for _ in range(3):
        rpc.rpc_sync("worker1", multiply_elsewhere, args=("worker2", *PAIR))
    profile.__exit__(None, None, None)
    inner = "rpc_sync#multiply(worker1 -> worker2)"
    averages = {row.key: row for row in profile.key_averages()}
    assert averages[inner].count == averages[f"{inner}#remote_op: aten::mul"].count == 3
    assert all(row.self_cpu_time_total >= 0 for row in averages.values())


def test_old_spans_are_forgotten(monkeypatch):
    monkeypatch.setattr(profiling, "MAX_EVENTS", 500)
    spans = profiling._Spans()
    names = []
    for number in range(2048):
        span = object.__new__(profiling.Span)
        span.remote = []
        spans.add(span)
        names.append(f"rpc_sync#f(a -> b) [{number + 1}]")
    assert spans.find(names[0]) is None
    assert spans.find(names[-1]) is not None
    assert sum(spans.find(name) is not None for name in names) == 500


def test_waits_for_the_interpreter_are_measured_when_asked_for(cluster):
    assert "gil_wait_us" not in rpc.debug_info()
    measure_gil_wait()
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    assert rpc.debug_info()["gil_wait_us"] >= 0
    measure_gil_wait(False)
    assert "gil_wait_us" not in rpc.debug_info()
