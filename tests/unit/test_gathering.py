"""Unit tests for mpirpc._core.gathering: rounds of all_gather and barrier."""

import threading

import pytest

import mpirpc as rpc
from mpirpc._core.gathering import RoundKey, Rounds
from mpirpc.errors import ConfigurationError, LocalProtocolError, RpcTimeoutError
from mpirpc.testing import LoopbackCluster

KEY = RoundKey(("a", "b"), 1)


@pytest.fixture
def rounds():
    kept = Rounds()
    yield kept
    assert len(kept) == 0


def on_all(cluster, work):
    """Run ``work(rank)`` as every worker at the same time; results or errors in order of rank."""
    outcomes = [None] * len(cluster.runtimes)

    def run(rank):
        with cluster.on(rank):
            try:
                outcomes[rank] = work(rank)
            except Exception as error:
                outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


# --- rounds ---


def test_a_round_is_done_when_the_last_one_has_come(rounds):
    first = rounds.join(KEY, "b", 2)
    assert not first.done()
    second = rounds.join(KEY, "a", 1)
    assert first.value() == second.value() == {"a": 1, "b": 2}


def test_nobody_comes_twice(rounds):
    rounds.join(KEY, "a", 1)
    with pytest.raises(LocalProtocolError, match="'a' came to round 1 of a, b twice"):
        rounds.join(KEY, "a", 1)
    rounds.join(KEY, "b", 2)


def test_nobody_else_comes(rounds):
    with pytest.raises(LocalProtocolError, match="'c' came to round 1 of a, b and is none of them"):
        rounds.join(KEY, "c", 1)
    rounds.join(KEY, "a", 1)
    rounds.join(KEY, "b", 2)


def test_a_round_given_up_fails_for_those_who_come_late(rounds):
    rounds.join(KEY, "a", 1)
    rounds.give_up(KEY, RpcTimeoutError("too late"))
    late = rounds.join(KEY, "b", 2)
    with pytest.raises(RpcTimeoutError, match="too late"):
        late.wait()


# --- on workers ---


def test_all_gather_returns_what_each_worker_gave():
    with LoopbackCluster(3) as cluster:
        outcomes = on_all(cluster, lambda rank: rpc.all_gather(10 * rank))
        assert outcomes == [{"worker0": 0, "worker1": 10, "worker2": 20}] * 3


def test_all_gather_of_some_workers_leaves_the_others_alone():
    with LoopbackCluster(3) as cluster:
        outcomes = on_all(cluster, lambda rank: rpc.all_gather(rank, ["worker2", 1]) if rank else None)
        assert outcomes == [None, {"worker1": 1, "worker2": 2}, {"worker1": 1, "worker2": 2}]


def test_rounds_follow_each_other():
    with LoopbackCluster(2) as cluster:
        outcomes = on_all(cluster, lambda rank: [rpc.all_gather(n)["worker0"] for n in range(5)])
        assert outcomes == [[0, 1, 2, 3, 4]] * 2


def test_a_worker_that_does_not_come_makes_the_round_time_out_for_all():
    with LoopbackCluster(3) as cluster:
        outcomes = on_all(cluster, lambda rank: rpc.barrier(timeout=0.05) if rank != 1 else None)
        assert isinstance(outcomes[0], RpcTimeoutError)
        assert isinstance(outcomes[2], RpcTimeoutError)


@pytest.mark.parametrize("patient", [0, 2])
def test_all_are_told_the_limit_that_ended_the_round(patient):
    with LoopbackCluster(3) as cluster:
        limits = {patient: 0, 2 - patient: 0.05}
        outcomes = on_all(cluster, lambda rank: rpc.barrier(timeout=limits[rank]) if rank != 1 else None)
    assert "(0.05 s)" in str(outcomes[0])
    assert "(0.05 s)" in str(outcomes[2])


def test_who_keeps_a_round_knows_who_is_missing():
    with LoopbackCluster(3) as cluster, cluster.on(0):
        with pytest.raises(RpcTimeoutError, match="'worker1', 'worker2' had not come"):
            rpc.barrier(timeout=0.05)


def test_whoever_calls_it_takes_part():
    with LoopbackCluster(2) as cluster, cluster.on(0):
        with pytest.raises(ConfigurationError, match="not among the workers that take part"):
            rpc.barrier(["worker1"])
