"""Unit tests for the death of a worker that the others survive (F1 to F4 in docs/design/failure.md)."""

import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import ConfigurationError, RRefError, WorkerLostError
from mpirpc.testing import LoopbackCluster
from tests.unit.waiting import until

GATE = threading.Event()
GONE = r"'worker1' \(rank 1\) has died"
kept = {}


@pytest.fixture
def cluster():
    """Three workers of which some may be killed; the others must come to a graceful end."""
    GATE.clear()
    kept.clear()
    made = LoopbackCluster(3, survives_losses=True)
    yield made
    GATE.set()
    kept.clear()
    made.shutdown(timeout=30)


def wait_for_the_gate():
    GATE.wait(30)


def keep(name, *rrefs):
    kept[name] = rrefs


def fetch(rref):
    return rref.to_here()


def double(tensor):
    return tensor * 2


def facts(name, worker):
    return rpc.rpc_sync(worker, rpc.debug_info)[name]


def wait_until_all_know(cluster):
    for rank in (0, 2):
        until(lambda: cluster.runtimes[rank].debug_info()["lost_workers"] == ["worker1"])  # noqa: B023


# --- F1: what needs the dead fails at once ---


def test_pending_calls_fail_and_name_the_worker(cluster):
    with cluster.on(0):
        futures = [rpc.rpc_async("worker1", wait_for_the_gate, timeout=0) for _ in range(3)]
        cluster.kill(1)
        for future in futures:
            with pytest.raises(WorkerLostError, match=GONE + r": no response to request \d+ \(.*gate\)"):
                future.wait()


def test_new_calls_fail(cluster):
    cluster.kill(1)
    with cluster.on(0):
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=GONE):
                rpc.rpc_sync("worker1", abs, args=(-1,))


def test_rrefs_of_the_dead_raise(cluster):
    with cluster.on(0):
        rref = rpc.remote("worker1", abs, args=(-1,))
        assert rref.to_here() == 1
        never = rpc.remote("worker1", wait_for_the_gate, timeout=0)
        cluster.kill(1)
        with pytest.raises(WorkerLostError, match=GONE):
            rref.to_here()
        with pytest.raises(WorkerLostError, match=GONE):
            never.to_here()
        with pytest.raises(WorkerLostError, match=GONE):
            rpc.rpc_sync("worker2", fetch, args=(rref,))
        dead_born = rpc.remote("worker1", abs, args=(-1,))
        with pytest.raises(WorkerLostError, match=GONE):
            dead_born.to_here()


def test_backward_through_the_dead_fails_at_the_root(cluster):
    weight = torch.ones(1, requires_grad=True)
    with cluster.on(0), rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", double, args=(weight,)).sum()
        cluster.kill(1)
        with pytest.raises(WorkerLostError, match=r"a backward pass needs 'worker1' \(rank 1\)"):
            rpc.autograd.backward(context_id, [loss])


def test_a_round_that_waits_for_the_dead_is_given_up(cluster):
    with cluster.on(0):
        waiting = rpc.rpc_async("worker2", rpc.barrier, args=(["worker1", "worker2"],))
        rounds = [rpc.rpc_async("worker2", rpc.barrier, args=(["worker0", "worker1", "worker2"],))]
        cluster.kill(1)
        with pytest.raises(WorkerLostError, match="worker1"):  # it would have kept this round itself
            waiting.wait()
        rounds.append(rpc.rpc_async("worker2", rpc.barrier))
        for future in rounds:
            with pytest.raises(WorkerLostError, match="'worker1' left or died"):
                future.wait()
        rest = ["worker0", "worker2"]
        other = rpc.rpc_async("worker2", rpc.barrier, args=(rest,))
        rpc.barrier(rest)
        other.wait()


# --- F2: the others go on ---


def test_calls_between_survivors_go_on(cluster):
    with cluster.on(0):
        before = rpc.rpc_async("worker2", wait_for_the_gate)
        cluster.kill(1)
        GATE.set()
        assert before.wait() is None
        assert rpc.rpc_sync("worker2", abs, args=(-1,)) == 1
        until(lambda: rpc.debug_info()["lost_workers"] == ["worker1"])


def test_a_cluster_that_does_not_survive_refuses():
    with LoopbackCluster(2) as plain, pytest.raises(ConfigurationError, match="does not survive"):
        plain.kill(1)


# --- F3: what the dead held is released ---


def test_handles_of_the_dead_are_released_at_their_owners(cluster):
    with cluster.on(0):
        here, there = rpc.RRef(7), rpc.remote("worker2", abs, args=(-2,))
        rpc.rpc_sync("worker1", keep, args=("dead", here, there))
        assert rpc.debug_info()["forks"] == 1
        cluster.kill(1)
        del there
        wait_until_all_know(cluster)
        until(lambda: rpc.debug_info()["forks"] == 0)
        until(lambda: facts("forks", "worker2") == 0)
        until(lambda: facts("owned_rrefs", "worker2") == 0)
        assert here.to_here() == 7


def test_a_handle_on_its_way_to_the_dead_is_released(cluster):
    """Nobody will ever accept it, whether its owner sent it or a user."""
    with cluster.on(0):
        here, there = rpc.RRef(7), rpc.remote("worker2", abs, args=(-2,))
        assert there.to_here() == 2
        cluster.network.hold(lambda source, dest, head: dest == 1)
        future = rpc.rpc_async("worker1", keep, args=("dead", here, there))
        cluster.kill(1)
        cluster.network.release_all()
        with pytest.raises(WorkerLostError):
            future.wait()
        wait_until_all_know(cluster)
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync("worker1", keep, args=("dead", here, there))
        until(lambda: rpc.debug_info()["pending_rrefs"] == rpc.debug_info()["forks"] == 0)
        del there, future
        until(lambda: facts("owned_rrefs", "worker2") == 0)


def test_a_handle_of_a_dead_owner_is_not_waited_for(cluster):
    """Worker 2 has asked the owner to confirm its handle; the function runs all the same."""
    with cluster.on(0):
        far = rpc.remote("worker1", abs, args=(-1,))
        assert far.to_here() == 1
        cluster.network.hold(lambda source, dest, head: dest == 1)
        future = rpc.rpc_async("worker2", keep, args=("alive", far))
        cluster.kill(1)
        cluster.network.release_all()
        assert future.wait() is None


def test_a_value_whose_creator_died_is_there_for_others(cluster):
    with cluster.on(1):
        rref = rpc.remote("worker2", abs, args=(-3,))
        rpc.rpc_sync("worker0", keep, args=("alive", rref))
        del rref
    with cluster.on(0):
        cluster.kill(1)
        wait_until_all_know(cluster)
        assert kept["alive"][0].to_here() == 3


def test_a_value_whose_remote_call_never_came_raises(cluster):
    """The creator's call is lost with it; worker 0 has a handle, and its fetch waits at worker 2."""
    with cluster.on(1):
        cluster.network.hold(lambda source, dest, head: (source, dest) == (1, 2))
        rref = rpc.remote("worker2", abs, args=(-3,))
        passing = rpc.rpc_async("worker0", keep, args=("alive", rref))
    with cluster.on(0):
        until(lambda: facts("owned_rrefs", "worker2") == 1)  # worker 0 has asked for its handle
        passing.wait()
        fetching = rpc.rpc_async("worker0", fetch, args=(kept["alive"][0],))
        until(
            lambda: facts("open_calls", "worker2") == 2
        )  # the fetch waits; the question itself is the other
        cluster.kill(1)
        with pytest.raises(RRefError, match="made it, or held it, has died"):
            fetching.wait()


def test_a_handle_whose_value_went_with_the_dead(cluster):
    """Worker 1 passed the last handle on to worker 0 and died before worker 0 had asked for its own."""
    with cluster.on(1):
        rref = rpc.remote("worker2", abs, args=(-3,))
        assert rref.to_here() == 3
        cluster.network.hold(lambda source, dest, head: (source, dest) == (0, 2))
        future = rpc.rpc_async("worker0", keep, args=("alive", rref))
        del rref
    with cluster.on(0):
        until(lambda: cluster.network.held)
        cluster.kill(1)
        wait_until_all_know(cluster)
        until(lambda: cluster.runtimes[2].debug_info()["owned_rrefs"] == 0)
        cluster.network.release_all()
        until(lambda: "alive" in kept)
        with pytest.raises(RRefError, match="made it, or held it, has died"):
            kept["alive"][0].to_here()
        del future


def test_contexts_of_the_dead_are_released(cluster):
    weight = torch.ones(1, requires_grad=True)
    with cluster.on(1):
        runtime = cluster.runtimes[1]
        context_id = runtime.autograd.new_context()
        rpc.rpc_sync("worker2", double, args=(weight,))
    assert cluster.runtimes[2].debug_info()["autograd_contexts"] == 1
    cluster.kill(1)
    until(lambda: cluster.runtimes[2].debug_info()["autograd_contexts"] == 0)
    assert context_id


# --- F4: the survivors end together ---


def test_death_during_a_graceful_shutdown(cluster):
    """Workers 0 and 2 wait in shutdown for worker 1, which dies."""
    errors = []

    def stop(rank):
        try:
            cluster.runtimes[rank].shutdown(graceful=True, timeout=30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stop, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    cluster.kill(1)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


def test_two_deaths_one_after_the_other(cluster):
    cluster.kill(1)
    wait_until_all_know(cluster)
    cluster.kill(2)
    with cluster.on(0):
        with pytest.raises(WorkerLostError, match="worker2"):
            rpc.rpc_sync("worker2", abs, args=(-1,))
        until(lambda: rpc.debug_info()["lost_workers"] == ["worker1", "worker2"])
