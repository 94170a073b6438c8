"""Unit tests for mpirpc._core.future: it is torch's future, and waiting for it moves the network."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch

import mpirpc as rpc
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0


def fail(text):
    raise ValueError(text)


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


@pytest.fixture
def held(cluster):
    """A future whose request is held back; release it by the network."""
    cluster.network.hold()
    future = rpc.rpc_async("worker1", max, args=(1, 2))
    yield future
    cluster.network.release_all()


def test_it_is_a_future_of_torch(cluster):
    future = rpc.rpc_async("worker1", max, args=(1, 2))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 2
    assert (future.done(), future.value()) == (True, 2)


def test_wait_again(cluster):
    future = rpc.rpc_async("worker1", max, args=(1, 2))
    assert [future.wait() for _ in range(3)] == [2, 2, 2]


def test_many_threads_wait_for_one(cluster, held):
    results = []
    threads = [threading.Thread(target=lambda: results.append(held.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    cluster.network.release_all()
    for thread in threads:
        thread.join(LIMIT)
    assert results == [2] * 8


def test_results_are_no_inference_tensors_whatever_mode_their_receiver_is_in(cluster):
    future = rpc.rpc_async("worker1", torch.ones, args=(2,))
    with torch.inference_mode():
        assert not rpc.rpc_sync("worker1", torch.ones, args=(2,)).is_inference()
        assert not rpc.rpc_sync(
            "worker1", torch.ones, args=(2,), kwargs={"requires_grad": True}
        ).is_inference()
    assert not future.wait().is_inference()


def test_then_runs_when_it_is_done(cluster, held):
    chained = held.then(lambda done: done.wait() + 1).then(lambda done: done.wait() * 10)
    assert not chained.done()
    cluster.network.release_all()
    assert chained.wait() == 30


def test_then_refuses_what_cannot_be_called(cluster):
    with pytest.raises(TypeError, match="callback=None is not callable"):
        rpc.rpc_async("worker1", max, args=(1, 2)).then(None)


def test_then_on_a_done_future_runs_here(cluster):
    future = rpc.rpc_async("worker1", max, args=(1, 2))
    future.wait()
    assert future.then(lambda done: threading.current_thread()).wait() is threading.current_thread()


def test_callbacks_run_as_the_worker_that_called(cluster, held):
    seen, over = [], threading.Event()
    held.add_done_callback(lambda done: seen.append((done.wait(), rpc.get_worker_info().id)) or over.set())
    cluster.network.release_all()
    assert over.wait(LIMIT)
    assert seen == [(2, 0)]


def test_callback_that_calls_and_waits(cluster, held):
    chained = held.then(lambda done: rpc.rpc_sync("worker1", max, args=(done.wait(), 9)))
    cluster.network.release_all()
    assert chained.wait() == 9


def test_error_of_a_callback_is_that_of_its_future(cluster):
    chained = rpc.rpc_async("worker1", max, args=(1, 2)).then(lambda done: fail("in callback"))
    further = chained.then(lambda done: done.wait())
    for future in (chained, further):
        with pytest.raises(ValueError, match="in callback"):
            future.wait()


def test_error_of_the_call_reaches_callbacks(cluster):
    chained = rpc.rpc_async("worker1", fail, args=("far away",)).then(lambda done: done.wait())
    with pytest.raises(ValueError, match="far away") as caught:
        chained.wait()
    assert "'worker1' (rank 1)" in str(caught.value.__cause__)


def test_collect_and_wait_all(cluster):
    futures = [rpc.rpc_async("worker1", max, args=(i, 3)) for i in range(5)]
    assert torch.futures.wait_all(futures) == [3, 3, 3, 3, 4]
    assert [done.value() for done in torch.futures.collect_all(futures).wait()] == [3, 3, 3, 3, 4]


def test_error_is_raised_anew_at_each_wait(cluster):
    """Each has its own traceback: two threads that wait do not write into one another's."""
    future = rpc.rpc_async("worker1", fail, args=("text",))
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="text") as caught:
            future.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


class Thing:
    pass


def wait_and_fail(start):
    """Wait with a local variable; return a weak reference to it, and the future."""
    thing = Thing()
    future = start()
    with pytest.raises(ValueError, match="text"):
        future.wait()
    return weakref.ref(thing), future


@pytest.mark.parametrize("chained", [False, True])
def test_failed_future_does_not_keep_the_frames_it_was_waited_in(cluster, chained):
    """torch's own does, out of the garbage collector's sight: local RRefs and tensors would never go."""

    def start():
        future = rpc.rpc_async("worker1", fail, args=("text",))
        return future.then(lambda done: done.wait()) if chained else future

    ref, future = wait_and_fail(start)
    gc.collect()
    assert ref() is None
    assert future.done()


def test_a_future_that_is_done_is_no_cycle(cluster):
    """Its result goes with the last reference, not with the next garbage collection."""
    gc.disable()
    try:
        future = rpc.rpc_async("worker1", max, args=(1, 2))
        future.wait()
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


def test_ctrl_c_in_wait_does_not_lose_the_result(cluster, held, monkeypatch):
    agent = cluster.runtimes[0].agent
    wait = agent.engine.wait

    def interrupted(goal, deadline):
        raise KeyboardInterrupt

    monkeypatch.setattr(agent.engine, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.wait()
    monkeypatch.setattr(agent.engine, "wait", wait)
    cluster.network.release_all()
    assert held.wait() == 2


def test_a_callback_behind_collect_all_may_call_when_the_call_times_out(cluster):
    """The timeout is found by the thread that polls; what it sets off must not keep it from polling."""
    cluster.network.hold(lambda source, dest, head: len(cluster.network.held) == 0)
    late = rpc.rpc_async("worker1", max, args=(1, 2), timeout=0.05)
    answers = []
    done = threading.Event()

    def call(_):
        answers.append(rpc.rpc_sync("worker1", max, args=(3, 4), timeout=10))
        done.set()

    torch.futures.collect_all([late]).then(call)
    with pytest.raises(rpc.RpcTimeoutError):
        late.wait()
    assert done.wait(LIMIT)
    assert answers == [4]
    cluster.network.release_all()


# --- asyncio ---


def test_await(cluster):
    async def gather():
        futures = [rpc.rpc_async("worker1", max, args=(i, 2)) for i in range(4)]
        return [await future for future in futures]

    assert asyncio.run(gather()) == [2, 2, 2, 3]


def test_event_loop_goes_on_while_a_future_is_awaited(cluster, held):
    async def both():
        async def release():
            cluster.network.release_all()

        return (await asyncio.gather(_awaited(held), release()))[0]

    assert asyncio.run(both()) == 2


async def _awaited(future):
    return await future


def test_await_raises_the_calls_error(cluster):
    with pytest.raises(ValueError, match="told"):
        asyncio.run(_awaited(rpc.rpc_async("worker1", fail, args=("told",))))


def test_cancelled_task_leaves_the_call_alone(cluster, held):
    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(held), timeout=0.01)

    asyncio.run(give_up())
    cluster.network.release_all()
    assert held.wait() == 2


# --- wait ---


def test_wait_for_one_and_for_several(cluster):
    assert rpc.wait(rpc.rpc_async("worker1", max, args=(1, 2))) == 2
    assert rpc.wait([rpc.rpc_async("worker1", max, args=(i, 2)) for i in range(4)]) == [2, 2, 2, 3]
    assert rpc.wait([]) == []


def test_wait_takes_futures_of_torch(cluster):
    futures = [rpc.rpc_async("worker1", max, args=(i, 2)) for i in range(3)]
    collected = torch.futures.collect_all(futures)
    assert [future.value() for future in rpc.wait(collected)] == [2, 2, 2]


def test_wait_leaves_at_the_first_error(cluster):
    failed = torch.futures.Future()
    never = torch.futures.Future()
    failed.set_exception(ValueError("told"))
    with pytest.raises(ValueError, match="told"):
        rpc.wait([never, failed])


def test_wait_has_a_limit(cluster, held):
    done = torch.futures.Future()
    done.set_result(5)
    with pytest.raises(rpc.RpcTimeoutError, match=r"1 of 2 futures were not done after 0\.01 s"):
        rpc.wait([done, held], timeout=0.01)
    cluster.network.release_all()
    assert rpc.wait(held, timeout=LIMIT) == 2
