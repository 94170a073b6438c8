"""Hangs that users of RPC systems met: each program here ends, whoever holds or waits for what."""

import gc
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import RpcTimeoutError
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0
"""Seconds after which a thread of a test counts as hanging."""

gate = threading.Event()
entered = threading.Event()
freed = threading.Event()
seen = []


@pytest.fixture(autouse=True)
def fresh_events():
    for event in (gate, entered, freed):
        event.clear()
    seen.clear()
    yield
    gate.set()


@pytest.fixture
def cluster():
    """Two workers that run one call at a time."""
    with LoopbackCluster(2, rpc.MPIRpcBackendOptions(num_worker_threads=1)) as made, made.on(0):
        yield made
        gate.set()


def wait_for_the_gate(result=None):
    entered.set()
    assert gate.wait(LIMIT)
    return result


def in_thread(cluster, function):
    """Start ``function`` as worker 0 on a new thread; the list gets its result, or what it raised."""
    outcome = []

    def run():
        with cluster.on(0):
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# --- the interpreter lock ---


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "to_here"])
def test_other_threads_run_while_one_waits(cluster, way):
    """pytorch#96036: a wait that kept the interpreter lock would end this test only at its time limit."""
    waits = {
        "rpc_sync": lambda: rpc.rpc_sync(1, wait_for_the_gate, args=(5,)),
        "rpc_async": lambda: rpc.rpc_async(1, wait_for_the_gate, args=(5,)).wait(),
        "to_here": lambda: rpc.remote(1, wait_for_the_gate, args=(5,)).to_here(),
    }
    thread, outcome = in_thread(cluster, waits[way])
    assert entered.wait(LIMIT)
    total = 0
    for number in range(200_000):  # pure Python: needs the lock, again and again
        total += number
    assert (thread.is_alive(), outcome) == (True, [])
    gate.set()
    thread.join(LIMIT)
    assert outcome == [5]


# --- user code inside the machinery ---


class CallsWhenItDies:
    """A value whose destructor makes calls, with an RRef in them."""

    def __del__(self):
        seen.append(rpc.rpc_sync(0, max, args=(1, 2)))
        seen.append(rpc.rpc_sync(0, fetch, args=(rpc.RRef(3),)))
        freed.set()


class CallsWhenItArrives:
    """An object whose unpickling makes a call to where it came from."""

    def __init__(self, back_to):
        self.back_to = back_to

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.got = rpc.rpc_sync(self.back_to, fetch, args=(rpc.RRef(7),))


class CallsWhenItLeaves:
    """An object whose pickling makes a call to where it goes."""

    def __init__(self, to):
        self.to = to

    def __reduce__(self):
        return int, (rpc.rpc_sync(self.to, max, args=(1, 2)),)


def fetch(rref):
    return rref.to_here()


def got_of(thing):
    return thing.got


def test_destructor_of_a_value_may_call(cluster):
    """pytorch#39555: objects die with none of the library's locks held."""
    rref = rpc.remote(1, CallsWhenItDies)
    del rref
    gc.collect()
    assert freed.wait(LIMIT)
    assert seen == [2, 3]


def test_destructor_of_an_argument_may_call(cluster):
    """pytorch#56701: the same for what a call carried."""
    assert rpc.rpc_sync(1, drop, args=(CallsWhenItDies(),)) is None
    assert freed.wait(LIMIT)


def drop(_):
    return None


def test_unpickling_may_call(cluster):
    """pytorch#38398: arguments and results are rebuilt with none of the library's locks held."""
    assert rpc.rpc_sync(1, got_of, args=(CallsWhenItArrives(0),)) == 7
    assert rpc.rpc_sync(1, CallsWhenItArrives, args=(1,)).got == 7


def test_pickling_may_call(cluster):
    """pytorch#39555: so are they taken apart."""
    assert rpc.rpc_sync(1, max, args=(CallsWhenItLeaves(1), 0)) == 2
    assert rpc.rpc_sync(1, CallsWhenItLeaves, args=(0,)) == 2


# --- callbacks ---


def test_many_callbacks_that_wait_for_their_own_future(cluster):
    """pytorch#58239: a future is done before its callbacks run."""
    for _ in range(10):
        futures = [rpc.rpc_async(1, max, args=(number, 0)) for number in range(40)]
        chained = [future.then(lambda done: done.wait() + 1) for future in futures]
        assert torch.futures.wait_all(chained) == [number + 1 for number in range(40)]


def test_callback_that_waits_for_its_own_failed_future(cluster):
    """pytorch#52132: it gets the error, and so does the future chained to it."""
    cluster.network.hold()
    future = rpc.rpc_async(1, max, args=(1, 2), timeout=0.01)
    chained = future.then(lambda done: done.wait())
    over = threading.Event()
    chained.add_done_callback(lambda done: over.set())
    for waited in (chained, chained.then(lambda done: done.wait()), future):
        with pytest.raises(RpcTimeoutError, match="more than set timeout"):
            waited.wait()
    assert over.wait(LIMIT)
    cluster.network.release_all()


def test_error_of_a_done_callback_is_not_lost(cluster, capfd):
    """pytorch#52132: nobody waits for such a callback, so what it raises is shown."""
    over = threading.Event()
    future = rpc.rpc_async(1, max, args=(1, 2))
    future.add_done_callback(lambda done: 1 / 0)
    future.add_done_callback(lambda done: over.set())
    assert future.wait() == 2
    assert over.wait(LIMIT)
    assert "ZeroDivisionError" in capfd.readouterr().err


# --- busy workers ---


def test_responses_come_in_while_every_thread_is_busy(cluster):
    """grpc/grpc#8603: worker 0's only thread runs a call; its own calls and callbacks end all the same."""
    busy = rpc.rpc_async(0, wait_for_the_gate)
    assert entered.wait(LIMIT)
    assert rpc.rpc_sync(1, max, args=(1, 2)) == 2
    assert rpc.rpc_async(1, max, args=(1, 2)).then(lambda done: done.wait() + 1).wait() == 3
    assert rpc.remote(1, max, args=(1, 2)).to_here() == 2
    assert not busy.done()
    gate.set()
    busy.wait()


def test_workers_that_wait_for_each_other_serve_each_other(cluster):
    """scylladb/scylladb#811: both threads of the group wait inside calls for calls to one another."""
    assert rpc.rpc_sync(1, there_and_back, args=(0, 6)) == 6


def there_and_back(to, depth):
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(to, there_and_back, args=(rpc.get_worker_info().id, depth - 1))


def test_fetch_of_a_value_that_is_not_there_holds_no_thread(cluster):
    """pytorch#36805: worker 1 has one thread, and it makes the value; fetches do not need it."""
    rref = rpc.remote(1, wait_for_the_gate, args=(5,))
    fetches = [rpc.rpc_async(0, fetch, args=(rref,)) for _ in range(8)]
    assert entered.wait(LIMIT)
    assert rpc.rpc_sync(0, max, args=(1, 2)) == 2
    assert not any(future.done() for future in fetches)
    gate.set()
    assert torch.futures.wait_all(fetches) == [5] * 8


def test_calls_on_a_value_that_is_not_there_return_at_once(cluster):
    """pytorch#50468: no proxy waits to learn what kind of value it is for."""
    rref = rpc.remote(1, wait_for_the_gate, args=("text",))
    future = rref.rpc_async().upper()
    further = rref.remote().upper()
    assert entered.wait(LIMIT)
    assert not future.done()
    gate.set()
    assert (future.wait(), further.to_here()) == ("TEXT", "TEXT")


# --- many callers ---


@pytest.mark.parametrize("num_callers", [1, 4, 16])
def test_callers_at_once(cluster, num_callers):
    """pytorch#57158: any number of threads may call; all of them get their own answers."""
    started = [
        in_thread(cluster, lambda start=start: [rpc.rpc_sync(1, max, args=(start + i, 0)) for i in range(50)])
        for start in range(0, 100 * num_callers, 100)
    ]
    for thread, _ in started:
        thread.join(LIMIT)
    assert [outcome for _, outcome in started] == [
        [[start + i for i in range(50)]] for start in range(0, 100 * num_callers, 100)
    ]
