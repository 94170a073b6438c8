"""Calls over real ranks: all ways to call, much at once, large tensors, nested and asynchronous, timeouts.

Rank 0 calls unless a test says otherwise; the others serve inside the fixture.
"""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import RpcTimeoutError

MIB = 1 << 20


class Adder:
    """A class with every kind of method."""

    def __init__(self, start):
        self.start = start

    def add(self, x):
        return self.start + x

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def make(cls, start):
        return cls(start)

    def __eq__(self, other):
        return self.start == other.start

    __hash__ = None


def keywords(a, b=2, *rest, c=3):
    return a, b, rest, c


def whoami():
    return rpc.get_worker_info()


def change(tensor, values):
    tensor.fill_(7)
    values.append(7)
    return tensor, values


def descend(depth, names):
    """Call each other, down to ``depth``."""
    if depth == 0:
        return [rpc.get_worker_info().id]
    below = rpc.rpc_sync(names[depth % len(names)], descend, args=(depth - 1, names))
    return [*below, rpc.get_worker_info().id]


# --- ways to call ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["name", "rank", "info", "own name"])
def test_ways_to_name_the_callee(rpc_world, kind):
    if rpc_world.rank:
        return
    info = rpc.get_worker_info("worker1")
    to = {"name": "worker1", "rank": 1, "info": info, "own name": "worker0"}[kind]
    expected = rpc.get_worker_info() if kind == "own name" else info
    assert rpc.rpc_sync(to, whoami) == expected
    assert rpc.rpc_async(to, whoami).wait() == expected
    assert rpc.remote(to, whoami).to_here() == expected


FUNCTIONS = {
    "function": (keywords, (1,), (1, 2, (), 3)),
    "class": (Adder, (5,), Adder(5)),
    "static method": (Adder.double, (5,), 10),
    "class method": (Adder.make, (5,), Adder(5)),
    "bound method": (Adder(5).add, (2,), 7),
    "builtin": (max, (1, 2), 2),
    "torch builtin": (torch.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
    "method of Tensor": (torch.Tensor.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
    "torch class": (torch.nn.Linear, (2, 2), None),
}


def assert_equal(result, expected):
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_kinds_of_functions(rpc_world, kind):
    if rpc_world.rank:
        return
    func, args, expected = FUNCTIONS[kind]
    for to in ("worker0", "worker1"):
        results = [
            rpc.rpc_sync(to, func, args=args),
            rpc.rpc_async(to, func, args=args).wait(),
            rpc.remote(to, func, args=args).to_here(),
        ]
        for result in results:
            if expected is None:
                assert isinstance(result, func)
            else:
                assert_equal(result, expected)


@pytest.mark.mpi(min_size=2)
def test_lambda(rpc_world):
    pytest.importorskip("cloudpickle")
    if rpc_world.rank == 0:
        offset = 3
        assert rpc.rpc_sync("worker1", lambda x: x + offset, args=(2,)) == 5


@pytest.mark.mpi(min_size=2)
def test_keyword_arguments(rpc_world):
    if rpc_world.rank == 0:
        assert rpc.rpc_sync("worker1", keywords, args=(1,), kwargs={"c": 4}) == (1, 2, (), 4)
        assert rpc.rpc_sync("worker1", keywords, args=[1, 5, 6]) == (1, 5, (6,), 3)
        assert rpc.rpc_sync("worker1", keywords, kwargs={"a": 1}) == (1, 2, (), 3)


@pytest.mark.mpi(min_size=2)
def test_every_rank_calls_every_rank_at_once(rpc_world):
    rpc_world.barrier()
    futures = [rpc.rpc_async(name, whoami) for name in rpc_world.names for _ in range(20)]
    expected = [rank for rank in range(rpc_world.size) for _ in range(20)]
    assert [future.wait().id for future in futures] == expected


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("numel", [4, 100_000])
def test_arguments_are_copied_also_to_oneself(rpc_world, to, numel):
    if rpc_world.rank:
        return
    tensor, values = torch.zeros(numel), [1]
    changed, longer = rpc.rpc_sync(to, change, args=(tensor, values))
    assert (changed.sum().item(), longer) == (7.0 * numel, [1, 7])
    assert (tensor.sum().item(), values) == (0.0, [1])


# --- much at once ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.rpc_options(num_worker_threads=2)
def test_nested_calls_deeper_than_there_are_threads(rpc_world):
    names = rpc_world.names[:2]
    if rpc_world.rank < 2:
        visited = rpc.rpc_sync(names[1], descend, args=(20, names))
        assert len(visited) == 21
        assert set(visited) == {0, 1}


@pytest.mark.mpi(min_size=2)
def test_a_thousand_calls_in_flight(rpc_world):
    if rpc_world.rank == 0:
        futures = [rpc.rpc_async("worker1", torch.add, args=(torch.tensor(i), 1)) for i in range(1000)]
        assert [future.wait().item() for future in futures] == list(range(1, 1001))


@pytest.mark.mpi(min_size=2)
def test_many_threads_call_at_once(rpc_world):
    if rpc_world.rank:
        return
    results = {}

    def caller(number):
        results[number] = [rpc.rpc_sync("worker1", max, args=(number, i)) for i in range(20)]

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [max(number, i) for i in range(20)] for number in range(16)}


# --- large tensors ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("nbytes", [MIB, 64 * MIB])
def test_large_tensors(rpc_world, to, nbytes):
    if rpc_world.rank == 0:
        tensor = torch.arange(nbytes // 8)
        assert torch.equal(rpc.rpc_sync(to, torch.add, args=(tensor, 1)), tensor + 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.rpc_options(chunk_nbytes=MIB)
@pytest.mark.parametrize("extra", [-8, 0, 8])
def test_large_tensors_in_chunks(rpc_world, extra):
    if rpc_world.rank == 0:
        tensor = torch.arange((8 * MIB + extra) // 8)
        futures = [rpc.rpc_async("worker1", torch.add, args=(tensor, i)) for i in range(4)]
        for i, future in enumerate(futures):
            assert torch.equal(future.wait(), tensor + i)


@pytest.mark.mpi(min_size=2)
@pytest.mark.rpc_options(max_unfinished_nbytes=MIB, eager_limit=100)
def test_large_tensors_both_ways_at_once_with_little_room(rpc_world):
    peer = rpc_world.names[1 - rpc_world.rank] if rpc_world.rank < 2 else rpc_world.name
    tensor = torch.arange(MIB // 8) + rpc_world.rank
    futures = [rpc.rpc_async(peer, torch.add, args=(tensor, i)) for i in range(16)]
    for i, future in enumerate(futures):
        assert torch.equal(future.wait(), tensor + i)


@pytest.mark.mpi(min_size=2)
def test_large_payload_without_tensors(rpc_world):
    if rpc_world.rank == 0:
        text = "abc" * MIB
        assert rpc.rpc_sync("worker1", str.upper, args=(text,)) == text.upper()


# --- futures ---


@pytest.mark.mpi(min_size=2)
def test_futures_chain_and_collect(rpc_world):
    if rpc_world.rank:
        return
    chained = rpc.rpc_async("worker1", max, args=(1, 2)).then(lambda done: done.wait() + 1)
    both = torch.futures.collect_all([chained, rpc.rpc_async("worker1", min, args=(1, 2))])
    assert [future.wait() for future in both.wait()] == [3, 1]
    assert torch.futures.wait_all([rpc.rpc_async("worker1", max, args=(i, 5)) for i in range(8)])[7] == 7


@pytest.mark.mpi(min_size=2)
def test_callback_may_call_again(rpc_world):
    if rpc_world.rank == 0:
        first = rpc.rpc_async("worker1", max, args=(1, 2))
        second = first.then(lambda done: rpc.rpc_sync("worker1", max, args=(done.wait(), 10)))
        assert second.wait() == 10


# --- async_execution ---


@rpc.functions.async_execution
def relay(to, x):
    return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda done: done.wait() * 10)


@rpc.functions.async_execution
def fail_later(to):
    def fail(done):
        raise ArithmeticError("later")

    return rpc.rpc_async(to, max, args=(1, 2)).then(fail)


@rpc.functions.async_execution
def no_future():
    return 5


class Relay:
    def __init__(self, factor=10):
        self.factor = factor

    @staticmethod
    @rpc.functions.async_execution
    def of_static(to, x):
        return relay(to, x)

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to, x):
        return relay(to, x)

    @rpc.functions.async_execution
    def bound(self, to, x):
        return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda done: done.wait() * self.factor)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "func", [relay, Relay.of_static, Relay.of_class, Relay().bound], ids=lambda func: func.__name__
)
def test_async_execution(rpc_world, func):
    if rpc_world.rank:
        return
    args = (rpc_world.names[-1], torch.ones(2))
    assert rpc.rpc_sync("worker1", func, args=args).tolist() == [20, 20]
    assert rpc.rpc_async("worker1", func, args=args).wait().tolist() == [20, 20]
    assert rpc.remote("worker1", func, args=args).to_here().tolist() == [20, 20]


@pytest.mark.mpi(min_size=2)
def test_async_execution_through_a_proxy(rpc_world):
    if rpc_world.rank == 0:
        rref = rpc.remote("worker1", Relay)
        args = ("worker0", torch.ones(1))
        assert rref.rpc_sync().bound(*args).item() == 20
        assert rref.rpc_async().of_static(*args).wait().item() == 20
        assert rref.remote().of_class(*args).to_here().item() == 20


@pytest.mark.mpi(min_size=2)
def test_async_execution_that_fails(rpc_world):
    if rpc_world.rank == 0:
        with pytest.raises(ArithmeticError, match="later"):
            rpc.rpc_sync("worker1", fail_later, args=("worker0",))
        with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future.*no_future returned int"):
            rpc.rpc_sync("worker1", no_future)
        rref = rpc.remote("worker1", fail_later, args=("worker0",))
        with pytest.raises(ArithmeticError, match="later"):
            rref.to_here()


_waiting = []
_all_here = threading.Lock()


@rpc.functions.async_execution
def gather(value, count):
    """Answer every caller with the sum as soon as ``count`` of them are here: no thread is held meanwhile."""
    future = torch.futures.Future()
    with _all_here:
        _waiting.append((future, value))
        ready = list(_waiting) if len(_waiting) == count else []
        if ready:
            _waiting.clear()
    for waiting, _ in ready:
        waiting.set_result(sum(value for _, value in ready))
    return future


@pytest.mark.mpi(min_size=2)
@pytest.mark.rpc_options(num_worker_threads=1)
def test_async_execution_holds_no_thread(rpc_world):
    futures = [rpc.rpc_async("worker1", gather, args=(i, 8 * rpc_world.size)) for i in range(8)]
    assert {future.wait() for future in futures} == {28 * rpc_world.size}


# --- timeouts ---

_gate = threading.Event()
_entered = threading.Semaphore(0)


def wait_for_the_gate():
    _entered.release()
    _gate.wait()
    return torch.ones(2)


def open_the_gate():
    _gate.set()


def close_the_gate():
    _gate.clear()


def wait_until_entered(count):
    for _ in range(count):
        _entered.acquire()


def is_settled():
    """Whether rank 0 has nothing pending: its late responses came and went."""
    info = rpc.debug_info()
    return info["pending_calls"] == 0 and info["pending_rrefs"] == 0


def rref_of_the_gate():
    return rpc.RRef(wait_for_the_gate())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_timeout(rpc_world, way):
    if rpc_world.rank:
        return
    rpc.rpc_sync("worker1", close_the_gate)
    call = rpc.rpc_sync if way == "sync" else lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()
    story = r"RPC ran for more than set timeout .*'worker1' \(rank 1\)"
    with pytest.raises(RpcTimeoutError, match=story) as caught:
        call("worker1", wait_for_the_gate, timeout=0.05)
    assert "wait_for_the_gate" in str(caught.value)
    assert (caught.value.worker, caught.value.timeout) == ("'worker1' (rank 1)", 0.05)
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    rpc.rpc_sync("worker1", open_the_gate)
    assert rpc.debug_info()["pending_calls"] == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.rpc_options(rpc_timeout=0.05)
def test_default_timeout_of_the_group(rpc_world):
    if rpc_world.rank:
        return
    rpc.rpc_sync("worker1", close_the_gate, timeout=0)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", wait_for_the_gate)
    rpc.rpc_sync("worker1", open_the_gate, timeout=0)


@pytest.mark.mpi(min_size=2)
def test_late_responses_leave_nothing_behind(rpc_world):
    """One with a tensor, one with an RRef in it, one that makes an RRef: all answered when nobody waits.

    The fixture checks that nothing is left, and the group's end that no handle waits for a confirmation.
    """
    if rpc_world.rank:
        return
    rpc.rpc_sync("worker1", close_the_gate)
    futures = [rpc.rpc_async("worker1", func, timeout=0.05) for func in (wait_for_the_gate, rref_of_the_gate)]
    rref = rpc.remote("worker1", wait_for_the_gate, timeout=0.05)
    for future in futures:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    rpc.rpc_sync("worker1", wait_until_entered, args=(3,))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.05)
    rpc.rpc_sync("worker1", open_the_gate)


@pytest.mark.mpi(min_size=2)
def test_timeout_of_to_here_and_of_proxies(rpc_world):
    if rpc_world.rank:
        return
    rpc.rpc_sync("worker1", close_the_gate)
    rref = rpc.remote("worker1", wait_for_the_gate)
    for use in (
        lambda: rref.to_here(timeout=0.05),
        lambda: rref.rpc_sync(timeout=0.05).sum(),
        lambda: rref.rpc_async(timeout=0.05).sum().wait(),
    ):
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than"):
            use()
    rpc.rpc_sync("worker1", open_the_gate)
    assert rref.rpc_sync().sum().item() == 2


@pytest.mark.mpi(min_size=2)
def test_nested_call_that_times_out_is_the_callers_error(rpc_world):
    if rpc_world.rank:
        return
    close_the_gate()
    with pytest.raises(RpcTimeoutError, match=r"'worker0' \(rank 0\)"):
        rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker0", wait_for_the_gate), kwargs={"timeout": 0.05})
    open_the_gate()
