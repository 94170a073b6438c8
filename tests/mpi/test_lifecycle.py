"""The group's life: names agreed, opened and closed many times, on part of the job, closed without asking."""

import threading
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import mpirpc as rpc
from mpirpc.errors import ConfigurationError, NotInitializedError, RpcTimeoutError, WorkerLostError

ROUNDS = 20
WARM_UP = 5
"""Rounds after which descriptors and memory must be flat."""


def options(comm, **more):
    return rpc.MPIRpcBackendOptions(comm=comm, **more)


@pytest.fixture
def comm():
    """A communicator of all ranks; the group of the test lives on it, or on a part of it."""
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    rpc.shutdown(graceful=False)
    duplicate.Free()


def everyones(comm, text):
    """What each rank says."""
    mine = text.encode().ljust(4000)
    all_of_them = bytearray(4000 * comm.size)
    comm.Allgather([mine, MPI.BYTE], [all_of_them, MPI.BYTE])
    return [all_of_them[at : at + 4000].decode().strip() for at in range(0, len(all_of_them), 4000)]


# --- names ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "named"),
    [
        (lambda rank: "same", "the name 'same' is used by ranks"),
        (lambda rank: "" if rank else "fine", "rank 1: the name '' is not allowed"),
        (lambda rank: "with space" if rank else "fine", "rank 1: the name 'with space' is not allowed"),
        (lambda rank: f"x{rank}" * 100, "rank 0: the name 'x0x0"),
        (lambda rank: 5 if rank else "fine", "rank 1: the name 5 is not allowed"),
        (lambda rank: "\u00e4" if rank == 1 else f"w{rank}", "rank 1: the name"),
    ],
    ids=["same", "empty", "space", "long", "number", "umlaut"],
)
def test_bad_names_fail_everywhere_alike(comm, name, named):
    with pytest.raises(ConfigurationError) as caught:
        rpc.init_rpc(name(comm.rank), rpc_backend_options=options(comm))
    assert named in str(caught.value)
    assert len(set(everyones(comm, str(caught.value)))) == 1
    rpc.init_rpc(rpc_backend_options=options(comm))
    assert rpc.rpc_sync(f"worker{comm.size - 1}", max, args=(1, 2)) == 2
    rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_device_map_for_nobody_fails_everywhere_alike(comm):
    maps = {"nobody": {"cuda:0": "cuda:0"}, "worker0": {"cuda:0": "cuda:1"}} if comm.rank == 1 else None
    with pytest.raises(ConfigurationError, match="rank 1: device_maps names 'nobody'") as caught:
        rpc.init_rpc(rpc_backend_options=options(comm, device_maps=maps))
    assert len(set(everyones(comm, str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("beliefs", [{"rank": 0}, {"world_size": 99}, {"rank": 7}], ids=repr)
def test_wrong_beliefs_fail_everywhere_alike(comm, beliefs):
    with pytest.raises(ConfigurationError, match="was given, but MPI says") as caught:
        rpc.init_rpc(rpc_backend_options=options(comm), **beliefs)
    assert len(set(everyones(comm, str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_right_beliefs_and_chosen_names(comm):
    name = f"ps:{comm.rank}.x-y_z"
    rpc.init_rpc(name, rank=comm.rank, world_size=comm.size, rpc_backend_options=options(comm))
    assert rpc.get_worker_info().name == name
    assert rpc.get_worker_info("ps:0.x-y_z").id == 0
    rpc.shutdown()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "wrong",
    [{"backend": "MPI"}, {"rpc_backend_options": rpc.RpcBackendOptions()}],
    ids=["backend", "options"],
)
def test_wrong_kinds_of_arguments_fail_before_anything_is_sent(comm, wrong):
    with pytest.raises(ConfigurationError):
        rpc.init_rpc(**{"rpc_backend_options": options(comm), **wrong})
    with pytest.raises(NotInitializedError):
        rpc.get_worker_info()


# --- again and again ---


def usage():
    """Threads and descriptors of this process."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.mpi(min_size=2)
def test_many_rounds_use_nothing_up(comm):
    seen = []
    for number in range(ROUNDS):
        rpc.init_rpc(f"round{number}-{comm.rank}", rpc_backend_options=options(comm))
        futures = [
            rpc.rpc_async(f"round{number}-{rank}", torch.add, args=(torch.ones(2), rank))
            for rank in range(comm.size)
        ]
        assert [future.wait()[0].item() for future in futures] == [1 + rank for rank in range(comm.size)]
        rpc.shutdown()
        seen.append(usage())
    assert len(set(seen[WARM_UP:])) == 1, seen


@pytest.mark.mpi(min_size=2)
def test_a_group_does_not_hear_the_one_before(comm):
    """Counts begin at zero, RRefs of the last group are gone."""
    for _ in range(3):
        rpc.init_rpc(rpc_backend_options=options(comm))
        rref = rpc.remote(f"worker{(comm.rank + 1) % comm.size}", torch.ones, args=(1,))
        assert rref.to_here().item() == 1
        assert rpc.debug_info()["calls_sent"] == 2
        rpc.shutdown()


# --- part of the job ---


@pytest.mark.mpi(min_size=2)
def test_groups_on_a_split_communicator(comm):
    part = comm.Split(comm.rank % 2, comm.rank)
    rpc.init_rpc(rpc_backend_options=options(part))
    assert rpc.get_worker_info().id == part.rank
    totals = [rpc.rpc_sync(rank, torch.add, args=(torch.tensor(comm.rank), 100)) for rank in range(part.size)]
    assert totals == [torch.tensor(comm.rank + 100)] * part.size
    rpc.shutdown()
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_group_without_one_rank(comm):
    part = comm.Split(MPI.UNDEFINED if comm.rank == 1 else 0, comm.rank)
    if comm.rank == 1:
        with pytest.raises(NotInitializedError):
            rpc.rpc_sync("worker0", max, args=(1, 2))
        return
    rpc.init_rpc(rpc_backend_options=options(part))
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    rpc.shutdown()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_group_of_one(comm):
    rpc.init_rpc(rpc_backend_options=options(MPI.COMM_SELF))
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2
    assert rpc.remote(0, max, args=(1, 2)).to_here() == 2
    rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_program_uses_its_communicator_meanwhile(comm):
    """The library works on duplicates: messages of the program never meet its own."""
    rpc.init_rpc(rpc_backend_options=options(comm))
    peer = (comm.rank + 1) % comm.size
    future = rpc.rpc_async(peer, max, args=(1, 2))
    got = bytearray(3)
    comm.Sendrecv([b"abc", MPI.BYTE], peer, 0, [got, MPI.BYTE], (comm.rank - 1) % comm.size, 0)
    assert (bytes(got), future.wait()) == (b"abc", 2)
    rpc.shutdown()


# --- the end ---

_gate = threading.Event()


def wait_for_the_gate():
    _gate.wait()


def call_on(names, depth):
    """Leave a call running that makes further calls, after its caller has gone to shutdown."""
    if depth:
        rpc.rpc_async(names[depth % len(names)], call_on, args=(names, depth - 1))


@pytest.mark.mpi(min_size=2)
def test_graceful_shutdown_waits_for_calls_that_calls_make(comm):
    names = [f"worker{rank}" for rank in range(comm.size)]
    for _ in range(5):
        rpc.init_rpc(rpc_backend_options=options(comm))
        rpc.rpc_async(names[0], call_on, args=(names, 12))
        rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_shutdown_waits_for_the_slowest(comm):
    """Rank 0 calls after the others have gone to shutdown: they go on serving."""
    rpc.init_rpc(rpc_backend_options=options(comm))
    if comm.rank == 0:
        for _ in range(200):
            assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_shutdown_with_a_limit(comm):
    _gate.clear()
    rpc.init_rpc(rpc_backend_options=options(comm))
    future = rpc.rpc_async("worker1", wait_for_the_gate) if comm.rank == 0 else None
    with pytest.raises((RpcTimeoutError, WorkerLostError), match=rf"shutdown of 'worker{comm.rank}'"):
        rpc.shutdown(timeout=0.1)
    _gate.set()
    if future is not None:
        with pytest.raises((NotInitializedError, WorkerLostError), match=r"pending when|left the group"):
            future.wait()
    with pytest.raises(NotInitializedError):
        rpc.get_worker_info()


@pytest.mark.mpi(min_size=2)
def test_ungraceful_shutdown_fails_what_is_pending(comm):
    _gate.clear()
    rpc.init_rpc(rpc_backend_options=options(comm))
    futures = [rpc.rpc_async("worker1", wait_for_the_gate) for _ in range(3)] if comm.rank == 0 else []
    rpc.shutdown(graceful=False)
    _gate.set()
    for future in futures:
        with pytest.raises((NotInitializedError, WorkerLostError), match=r"pending when|left the group"):
            future.wait()
    everyones(comm, "all are here")
    rpc.init_rpc(rpc_backend_options=options(comm))
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_who_waits_for_a_worker_that_has_left_is_told(comm):
    """Calls to it fail at once, and a graceful shutdown does not wait for ever."""
    _gate.clear()
    rpc.init_rpc(rpc_backend_options=options(comm))
    future = rpc.rpc_async("worker1", wait_for_the_gate) if comm.rank == 0 else None
    everyones(comm, "called")
    if comm.rank == 1:
        rpc.shutdown(graceful=False)
    else:
        with pytest.raises(WorkerLostError, match=r"left (the group|without)"):
            (future.wait if future is not None else rpc.shutdown)()
        with pytest.raises((WorkerLostError, NotInitializedError)):
            rpc.rpc_sync("worker1", max, args=(1, 2))
        rpc.shutdown(graceful=False)
    _gate.set()
    everyones(comm, "left")


@pytest.mark.mpi(min_size=2)
def test_shutdown_twice_and_without_init(comm):
    rpc.shutdown()
    rpc.init_rpc(rpc_backend_options=options(comm))
    rpc.shutdown()
    rpc.shutdown()
    rpc.shutdown(graceful=False)


@pytest.mark.mpi(min_size=2)
def test_handles_still_held_at_shutdown_are_released(comm):
    rpc.init_rpc(rpc_backend_options=options(comm))
    held = [rpc.remote(rank, torch.ones, args=(1,)) for rank in range(comm.size)]
    rpc.shutdown()
    assert "RRef" in repr(held[0])
