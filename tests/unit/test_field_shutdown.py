"""Ends of groups as users met them: shutdown comes through, once, from anywhere; nothing runs on."""

import ast
import os
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc._core import executor
from mpirpc.errors import (
    NotInitializedError,
    RpcTimeoutError,
    SerializationError,
    TransportError,
    WorkerLostError,
)
from mpirpc.testing import LoopbackCluster
from tests._ranks.launch import ROOT

LIMIT = 30.0

gate = threading.Event()
entered = threading.Semaphore(0)


@pytest.fixture(autouse=True)
def closed_gate():
    gate.clear()
    while entered.acquire(blocking=False):
        pass
    yield
    gate.set()


def wait_for_the_gate():
    entered.release()
    assert gate.wait(LIMIT)
    return "through"


def as_worker(cluster, rank, function):
    """Start ``function`` as a worker on a new thread; the list gets its result, or what it raised."""
    outcome = []

    def run():
        with cluster.on(rank):
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# --- pending calls ---


def test_all_calls_to_a_worker_that_leaves_fail_and_say_so():
    """monarch#2471: ten calls are open when it goes; each is told at once, and why."""
    cluster = LoopbackCluster(3, rpc.MPIRpcBackendOptions(rpc_timeout=0))  # no deadline would end them
    with cluster.on(0):
        rref = rpc.remote(1, wait_for_the_gate)
        futures = [rpc.rpc_async(1, wait_for_the_gate) for _ in range(7)]
        futures += [
            rref.rpc_async().upper(),
            rpc.rpc_async(1, wait_for_the_gate).then(lambda done: done.wait()),
        ]
        thread, outcome = as_worker(cluster, 0, rref.to_here)
        for _ in range(9):
            assert entered.acquire(timeout=LIMIT)
        cluster.runtimes[1].shutdown(graceful=False, timeout=0)
        for future in futures:
            with pytest.raises(WorkerLostError, match=r"'worker1' \(rank 1\) left the group"):
                future.wait()
        thread.join(LIMIT)
        assert [type(error) for error in outcome] == [WorkerLostError]
        assert rpc.rpc_sync(2, max, args=(1, 2)) == 2
        gate.set()
    cluster.shutdown(graceful=False)


def test_shutdown_while_calls_are_pending_here():
    """pytorch#33740: whoever waits on another thread when the group is closed without asking is told."""
    cluster = LoopbackCluster(2, rpc.MPIRpcBackendOptions(rpc_timeout=0))
    waits = [
        as_worker(cluster, 0, lambda: rpc.rpc_sync(1, wait_for_the_gate)),
        as_worker(cluster, 0, lambda: rpc.rpc_async(1, wait_for_the_gate).wait()),
        as_worker(cluster, 0, lambda: rpc.remote(1, wait_for_the_gate).to_here()),
        as_worker(cluster, 0, lambda: rpc.remote(0, wait_for_the_gate).local_value()),
        as_worker(cluster, 0, rpc.barrier),
    ]
    for _ in range(4):
        assert entered.acquire(timeout=LIMIT)
    cluster.shutdown(graceful=False)
    for thread, _ in waits:
        thread.join(LIMIT)
    errors = [error for _, outcome in waits for error in outcome]
    assert len(errors) == 5
    assert all(isinstance(error, NotInitializedError | WorkerLostError) for error in errors), errors


def test_calls_that_nobody_waited_for_are_completed():
    """jax#4335: graceful shutdown is a promise to the calls that were started."""
    done = []
    with LoopbackCluster(2) as cluster, cluster.on(0):
        for number in range(100):
            rpc.rpc_async(1, max, args=(number, 0)).add_done_callback(
                lambda future: done.append(future.value())
            )
    assert sorted(done) == list(range(100))


# --- the barrier inside ---


@pytest.mark.parametrize("chain", [lambda future: future, lambda future: torch.futures.collect_all([future])])
@pytest.mark.parametrize("who_leaves", [0, 1])
@pytest.mark.parametrize("last_works", [0.5, 0.0])  # 0: no thread of the pool comes to it
def test_callback_of_a_call_that_fails_may_wait_for_another_that_fails(
    monkeypatch, chain, who_leaves, last_works
):
    monkeypatch.setattr(executor, "LAST_WORKS", last_works)
    cluster = LoopbackCluster(2, rpc.MPIRpcBackendOptions(rpc_timeout=0))
    with cluster.on(0):
        cluster.network.hold(lambda source, dest, head: dest == 1)
        first, second = (rpc.rpc_async("worker1", max, args=(1, number)) for number in range(2))
        over = threading.Event()
        chain(first).then(lambda _: second.wait()).add_done_callback(lambda _: over.set())
        cluster.runtimes[who_leaves].shutdown(graceful=False, timeout=0)
        assert over.wait(LIMIT)
        cluster.network.release_all()
        cluster.runtimes[1 - who_leaves].shutdown(graceful=False, timeout=0)


def test_failure_while_the_group_comes_to_rest_is_raised_and_the_worker_stops(monkeypatch):
    """pytorch#61094: shutdown raises it, is over, and can be called again."""
    cluster = LoopbackCluster(2)

    def fail(values):
        raise OSError("the network broke")

    monkeypatch.setattr(cluster.runtimes[0].transport, "post_sum", fail)
    with pytest.raises(TransportError, match="the network broke"):
        cluster.runtimes[0].shutdown(graceful=True, timeout=LIMIT)
    assert not cluster.runtimes[0].is_running
    with pytest.raises(WorkerLostError, match="left without waiting"):
        cluster.runtimes[1].shutdown(graceful=True, timeout=LIMIT)
    assert not cluster.runtimes[1].is_running


def test_many_ends_at_the_same_time():
    """pytorch#36113: workers ask for the end in every order; nobody is counted twice."""
    for number in range(20):
        cluster = LoopbackCluster(4)
        with cluster.on(number % 4):
            rpc.rpc_async((number + 1) % 4, max, args=(1, 2))
        order = [(number + step) % 4 for step in range(4)]
        started = [
            as_worker(cluster, rank, lambda runtime=cluster.runtimes[rank]: runtime.shutdown(True, LIMIT))
            for rank in order
        ]
        for thread, _ in started:
            thread.join(LIMIT)
        assert [outcome for _, outcome in started] == [[None]] * 4


def test_end_without_asking_from_several_threads_at_once():
    """pytorch#33740: it may be called in any state, any number of times."""
    cluster = LoopbackCluster(2)
    with cluster.on(0):
        rpc.rpc_async(1, wait_for_the_gate)
    ready = threading.Barrier(6)

    def end(rank):
        ready.wait(LIMIT)
        cluster.runtimes[rank].shutdown(graceful=False, timeout=0)

    started = [as_worker(cluster, n % 2, lambda n=n: end(n % 2)) for n in range(6)]
    for thread, _ in started:
        thread.join(LIMIT)
    assert [outcome for _, outcome in started] == [[None]] * 6
    cluster.shutdown(graceful=False)


def test_graceful_end_from_several_threads_at_once():
    """pytorch#36113: they end the group together, once; each returns when it is over."""
    cluster = LoopbackCluster(2)
    with cluster.on(0):
        rpc.rpc_async(1, wait_for_the_gate)
    started = [
        as_worker(cluster, n % 2, lambda n=n: cluster.runtimes[n % 2].shutdown(True, LIMIT)) for n in range(6)
    ]
    assert entered.acquire(timeout=LIMIT)
    gate.set()
    for thread, _ in started:
        thread.join(LIMIT)
    assert [outcome for _, outcome in started] == [[None]] * 6


def test_end_without_asking_overtakes_a_graceful_one():
    """pytorch#33740: a thread waits in shutdown for workers that do not come; another one ends it."""
    cluster = LoopbackCluster(2)
    with cluster.on(0):
        rpc.rpc_async(0, wait_for_the_gate)
    assert entered.acquire(timeout=LIMIT)
    thread, outcome = as_worker(cluster, 0, lambda: cluster.runtimes[0].shutdown(graceful=True, timeout=0))
    while not cluster.runtimes[0]._ending.locked():
        assert rpc_of(cluster, 1) == 2
    cluster.runtimes[0].shutdown(graceful=False, timeout=0)
    thread.join(LIMIT)
    assert [type(error) for error in outcome] == [NotInitializedError]
    cluster.shutdown(graceful=False)


def rpc_of(cluster, rank):
    with cluster.on(rank):
        return rpc.rpc_sync(rank, max, args=(1, 2))


# --- rounds of all_gather and barrier ---


@pytest.mark.parametrize("rank", [0, 1])
def test_round_that_timed_out_does_not_hold_up_the_end(rank):
    """desispec#2209: one worker gives up a barrier that the others never reach; shutdown comes through."""
    with LoopbackCluster(2) as cluster, cluster.on(rank), pytest.raises(RpcTimeoutError, match="timed out"):
        rpc.barrier(timeout=0.01)


@pytest.mark.parametrize("giver", [0, 1])
def test_round_that_one_worker_cannot_take_part_in_fails_for_all(giver):
    """desispec#2209: ranks that wait for one that failed are told; they do not wait for ever."""
    with LoopbackCluster(2) as cluster:
        thread, outcome = as_worker(cluster, 1 - giver, rpc.barrier)
        with cluster.on(giver), pytest.raises(SerializationError):
            rpc.all_gather(number for number in range(3))
        thread.join(LIMIT)
        assert f"'worker{giver}' (rank {giver}) gave up round 1" in str(outcome[0])


# --- the program's own things ---


def test_package_spawns_and_forks_nothing_and_opens_no_windows():
    """ompi#12016, ompi#12892, mpi4py#15, horovod#439: what MPI libraries do badly is not used, nor MPI ended.

    Neither are mpi4py's pickled collectives, which can block all threads (mpi4py#784).
    """
    forbidden = {
        *("Spawn", "Spawn_multiple", "Connect", "Accept", "Win", "Finalize"),
        *("bcast", "allgather", "allreduce", "alltoall", "scatter", "exscan", "system", "popen", "Popen"),
    }
    machinery = [*(ROOT / "mpirpc").glob("*.py"), *(ROOT / "mpirpc" / "_core").glob("*.py")]
    machinery.remove(ROOT / "mpirpc" / "_core" / "rank_launcher.py")  # runs beside the ranks, for tests
    used = [
        f"{path.name}:{node.lineno}: {node.attr}"
        for path in machinery
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and (node.attr in forbidden or ast.unparse(node) == "os.fork")
    ]
    assert len(machinery) > 20
    assert used == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused_everything_and_the_parent_goes_on():
    """pytorch#13787: also through handles and futures that it has from its parent."""
    with LoopbackCluster(2) as cluster, cluster.on(0):
        rref, future = rpc.remote(1, list), rpc.rpc_async(1, wait_for_the_gate)
        assert entered.acquire(timeout=LIMIT)
        uses = [
            lambda: rpc.rpc_sync(1, max, args=(1, 2)),
            lambda: rpc.RRef(1),
            rref.to_here,
            lambda: rref.rpc_sync().copy(),
            lambda: rref.remote().copy(),
            future.wait,
            rpc.barrier,
        ]
        answers = answers_of_child(uses)
        gate.set()
        assert future.wait() == "through"
        assert rref.to_here() == []
    assert [answer.partition(":")[0] for answer in answers] == ["NotInitializedError"] * len(uses)
    assert all("was forked from an RPC worker" in answer for answer in answers)


def answers_of_child(uses):
    """What a forked child gets from each of ``uses``, and from shutdown: one line each, or an error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writing, "w") as pipe:
            for use in uses:
                try:
                    pipe.write(f"no error: {use()}\n")
                except BaseException as error:
                    pipe.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
            rpc.shutdown()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    assert os.waitpid(pid, 0)[1] == 0
    return lines


def double(x):
    return 2 * x


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_with_forked_workers():
    """pytorch#13787: its processes are forked while RPC runs, also by a function that runs as a call."""
    with LoopbackCluster(2) as cluster, cluster.on(0):
        assert load() == 28
        assert rpc.rpc_sync(1, load) == 28
        assert rpc.rpc_sync(1, double, args=(2,)) == 4


def load():
    data = torch.utils.data.DataLoader(range(8), num_workers=2, batch_size=2, multiprocessing_context="fork")
    return int(sum(batch.sum() for batch in data))
