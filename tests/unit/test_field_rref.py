"""RRefs, and what must not stay in memory: cases that users of RPC systems met."""

import gc
import threading
import weakref

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import NotInitializedError
from mpirpc.testing import LoopbackCluster
from tests.unit.waiting import until

LIMIT = 30.0

died = threading.Event()


@pytest.fixture
def cluster():
    died.clear()
    with LoopbackCluster(3) as made, made.on(0):
        yield made


class Watched:
    """Tells when its last copy in this process has died; the caller's is not counted."""

    def __init__(self, is_copy=False):
        self.is_copy = is_copy

    def __reduce__(self):
        return Watched, (True,)

    def __del__(self):
        if self.is_copy:
            died.set()


def take(_):
    return None


def echo(value):
    return value


class Fn:
    """A value that can be called."""

    def __call__(self, x, scale=1):
        return scale * x


def test_callable_value_is_called_through_its_handle(cluster):
    """pytorch#80774: ``rref.rpc_sync()(x)``, without naming ``__call__``."""
    rref = rpc.remote(1, Fn)
    assert rref.rpc_sync()(3, scale=2) == 6
    assert rref.rpc_async()(3).wait() == 3
    assert rref.remote()(3).to_here() == 3


def test_state_of_a_remote_model_is_saved_and_loaded(cluster, tmp_path):
    """pytorch#38118: a model made of parts on several workers goes into one file and back."""
    parts = [rpc.remote(rank, torch.nn.Linear, args=(2, 2)) for rank in range(3)]
    saved = [rref.rpc_sync().state_dict() for rref in parts]
    torch.save(saved, tmp_path / "model.pt")
    others = [rpc.remote(rank, torch.nn.Linear, args=(2, 2)) for rank in range(3)]
    for rref, state in zip(others, torch.load(tmp_path / "model.pt"), strict=True):
        rref.rpc_sync().load_state_dict(state)
    x = torch.ones(1, 2)
    for old, new in zip(parts, others, strict=True):
        assert torch.equal(old.rpc_sync().forward(x), new.rpc_sync().forward(x))


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "then", "remote"])
def test_nothing_of_a_call_stays_with_the_threads_that_ran_it(cluster, to, way):
    """tensorpipe#396: an argument dies at the callee, a result at the caller, while all threads live on."""
    ways = {
        "rpc_sync": rpc.rpc_sync,
        "rpc_async": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait(),
        "then": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).then(lambda done: done.wait()).wait(),
        "remote": lambda *args, **kwargs: rpc.remote(*args, **kwargs).to_here(),
    }
    ways[way](to, take, args=(Watched(),))
    gc.collect()  # a cycle of torch's futures is no leak
    assert died.wait(LIMIT)
    died.clear()
    if (way, to) != ("remote", 0):  # that one is the value itself
        result = ways[way](to, Watched)
        assert result.is_copy
        del result
        gc.collect()
        assert died.wait(LIMIT)


def pass_on(names, rrefs):
    """Send handles, old ones and a new one, round all workers; nobody waits for it."""
    if names:
        rpc.rpc_async(names[0], pass_on, args=(names[1:], [*rrefs, rpc.RRef(len(names))]))


def test_shutdown_right_after_a_chain_of_handles_began():
    """pytorch#30022: it ends when the chain has, and every value is free then."""
    for _ in range(10):
        cluster = LoopbackCluster(3)
        with cluster.on(0):
            rpc.rpc_async(1, pass_on, args=([2, 0, 1] * 4, [rpc.RRef(torch.ones(1)), rpc.remote(2, list)]))
        cluster.shutdown()  # raises RRefError if a value is still referenced
        assert sum(runtime.server.num_served for runtime in cluster.runtimes) == 14
        assert [runtime.debug_info()["owned_rrefs"] for runtime in cluster.runtimes] == [0, 0, 0]


def test_handle_given_away_and_dropped_at_once(cluster):
    """pytorch#26759: A makes a value on B, gives the handle to C and forgets it; C can use it for ever."""
    cluster.network.hold(lambda source, dest, head: source == 2)  # C's news that it has a handle
    for _ in range(20):
        rref = rpc.remote(1, list, args=((1, 2),))
        future = rpc.rpc_async(2, rpc.RRef.to_here, args=(rref,))
        del rref
        cluster.network.release_all()
        assert future.wait() == [1, 2]
        cluster.network.hold(lambda source, dest, head: source == 2)
    cluster.network.release_all()


def test_handles_in_user_code_after_shutdown():
    """pytorch#27928: they are let go at shutdown without complaint, and say so when they are used."""
    with LoopbackCluster(2) as cluster, cluster.on(0):
        mine, theirs = rpc.RRef(1), rpc.remote(1, list)
    for use in (theirs.to_here, lambda: theirs.rpc_sync().copy(), lambda: theirs.remote().copy()):
        with pytest.raises(NotInitializedError, match=r"mpirpc\.shutdown was called"):
            use()
    assert mine.local_value() == 1


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def scale(x, weight):
    return x * weight


def test_memory_stays_flat_over_many_passes(cluster):
    """pytorch#61920: 300 forward and backward passes with 1 MiB of gradients; a leak would take 300 MiB."""
    weight = torch.ones(1 << 18, requires_grad=True)

    def run(passes):
        for _ in range(passes):
            with autograd.context() as context_id:
                loss = rpc.rpc_sync(1, scale, args=(torch.ones(1 << 18), weight)).sum()
                autograd.backward(context_id, [loss])
                assert autograd.get_gradients(context_id)[weight][0] == 1

    run(30)
    threads, before = threading.active_count(), resident_nbytes()
    run(300)
    assert resident_nbytes() - before < 64 << 20
    until(lambda: threading.active_count() <= threads + 3)  # spare ones end after a while


def test_done_future_keeps_no_argument(cluster):
    """tensorpipe#396: whoever keeps a future keeps its result, not what was sent for it."""
    argument = Watched()
    future = rpc.rpc_async(1, echo, args=([argument],))
    assert future.wait()[0].is_copy
    gone = weakref.ref(argument)
    del argument
    gc.collect()
    assert gone() is None
