"""Ctrl-C, forks and the program's own MPI traffic beside RPC: what users met as hangs on real ranks."""

import os
import signal
import threading

import pytest
import torch
from mpi4py import MPI

import mpirpc as rpc
from mpirpc._core.current import get_current
from mpirpc.errors import NotInitializedError, TransportError, WorkerLostError

LIMIT = 30.0

gate = threading.Event()
entered = threading.Semaphore(0)


@pytest.fixture(autouse=True)
def closed_gate():
    """Each test begins with a closed gate on all ranks, and opens its own at the end."""
    gate.clear()
    while entered.acquire(blocking=False):
        pass
    yield
    gate.set()


def wait_for_the_gate(result=None):
    entered.release()
    assert gate.wait(LIMIT)
    return result


def wait_until_entered(count):
    for _ in range(count):
        assert entered.acquire(timeout=LIMIT)


def open_the_gate():
    gate.set()


# --- Ctrl-C ---


def interrupted(wait, has_begun):
    """Run ``wait`` on this thread, the main one, and send this process SIGINT as soon as ``has_begun()``."""

    def strike():
        has_begun()
        os.kill(os.getpid(), signal.SIGINT)

    striker = threading.Thread(target=strike)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the signal may come as soon as there is a striker
        striker.start()
        wait()
    striker.join(LIMIT)


WAITS = {
    "rpc_sync": lambda to: rpc.rpc_sync(to, wait_for_the_gate),
    "rpc_async": lambda to: rpc.rpc_async(to, wait_for_the_gate).wait(),
    "then": lambda to: rpc.rpc_async(to, wait_for_the_gate).then(lambda done: done.wait()).wait(),
    "to_here": lambda to: rpc.remote(to, wait_for_the_gate).to_here(),
    "proxy": lambda to: rpc.remote(to, wait_for_the_gate).rpc_sync().upper(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAITS)
def test_ctrl_c_ends_a_wait_on_any_rank(rpc_world, way):
    """mpi4py#468: the prompt is back at once, and the group works on, on every rank."""
    to = (rpc_world.rank + 1) % rpc_world.size
    assert rpc.rpc_sync(to, max, args=(1, 2)) == 2
    rpc_world.barrier()
    # the signal comes when the call runs at its callee
    interrupted(lambda: WAITS[way](to), lambda: rpc.rpc_sync(to, wait_until_entered, args=(1,)))
    assert rpc.rpc_sync(to, max, args=(1, 2)) == 2
    rpc_world.barrier()
    gate.set()


@pytest.mark.mpi(min_size=2)
def test_ctrl_c_ends_a_barrier_and_tells_the_others(rpc_world):
    """desispec#2209: rank 0 is interrupted in a barrier; the others, which wait there too, are told."""
    if rpc_world.rank == 0:
        rounds = get_current().gathering.rounds
        interrupted(rpc.barrier, lambda: call_until(lambda: len(rounds) > 0))
        rpc_world.barrier()
    else:
        rpc_world.barrier()
        with pytest.raises(rpc.RpcError, match=r"'worker0' \(rank 0\) gave up round 1"):
            rpc.barrier()


def call_until(is_so):
    """Call this worker itself until something is true: it goes on serving meanwhile."""
    while not is_so():
        rpc.rpc_sync(rpc.get_worker_info().id, max, args=(1, 2))


@pytest.mark.mpi(min_size=2)
def test_ctrl_c_ends_shutdown_and_tells_the_others():
    """pytorch#61094: whoever breaks off a graceful shutdown leaves; the others do not wait for it."""
    comm = MPI.COMM_WORLD.Dup()
    rpc.init_rpc(rpc_backend_options=rpc.MPIRpcBackendOptions(comm=comm))
    if comm.rank == 0:
        busy = rpc.rpc_async(0, wait_for_the_gate)  # keeps the group from coming to rest
        runtime = get_current()
        wait_until_entered(1)
        interrupted(rpc.shutdown, lambda: call_until(runtime._ending.locked))
        with pytest.raises(NotInitializedError):
            rpc.get_worker_info()
        gate.set()
        with pytest.raises(NotInitializedError):
            busy.wait()
    else:
        with pytest.raises(WorkerLostError, match="left without waiting"):
            rpc.shutdown()
    comm.Barrier()
    comm.Free()


# --- the program's own MPI traffic ---


def chatter(comm, rounds, stop_early=None):
    """Send integers round the ranks of ``comm`` and sum them up, as a program does beside RPC."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number in range(rounds):
        mine, theirs = torch.tensor([number, comm.rank]), torch.zeros(2, dtype=torch.int64)
        comm.Sendrecv(mine.numpy(), right, number % 7, theirs.numpy(), left, number % 7)
        assert theirs.tolist() == [number, left]
        total = torch.zeros(1, dtype=torch.int64)
        comm.Allreduce(torch.tensor([number]).numpy(), total.numpy())
        assert total.item() == number * comm.size


@pytest.mark.mpi(min_size=2)
def test_program_uses_comm_world_from_a_thread_of_its_own():
    """hpx#6213: its messages and collectives on COMM_WORLD, any tag, and those of RPC do not meet.

    RPC runs on a communicator of part of the ranks (all but the last of three or more), and on all.
    """
    world = MPI.COMM_WORLD
    part = world.Split(0 if world.size < 3 or world.rank < world.size - 1 else 1, world.rank)
    for comm in (world, part):
        errors = []

        def talk(errors=errors):
            try:
                chatter(world, 100)
            except BaseException as error:
                errors.append(error)

        rpc.init_rpc(rpc_backend_options=rpc.MPIRpcBackendOptions(comm=comm))
        thread = threading.Thread(target=talk)
        thread.start()
        for number in range(100):
            x = torch.full((20_000,), number)
            assert torch.equal(rpc.rpc_sync((comm.rank + 1) % comm.size, torch.add, args=(x, 1)), x + 1)
        thread.join(LIMIT)
        assert not thread.is_alive()
        assert errors == []
        rpc.shutdown()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_program_makes_and_frees_communicators_beside_rpc(rpc_world):
    """mpi4py#784: duplicates, splits and frees of the program's, all ranks together, while RPC polls."""
    futures = [rpc.rpc_async(rank, max, args=(1, 2)) for rank in range(rpc_world.size) for _ in range(50)]
    for number in range(10):
        duplicate = rpc_world.comm.Dup()
        part = duplicate.Split(number % 2, duplicate.rank)
        chatter(part, 3)
        part.Free()
        duplicate.Free()
    assert torch.futures.wait_all(futures) == [2] * len(futures)


# --- pending calls when a worker goes ---


@pytest.mark.mpi(min_size=2)
def test_ten_calls_to_a_rank_that_leaves_fail_and_say_so():
    """monarch#2471: all are told at once, whatever their limits."""
    comm = MPI.COMM_WORLD.Dup()
    rpc.init_rpc(
        rpc_backend_options=rpc.MPIRpcBackendOptions(comm=comm, rpc_timeout=0, num_worker_threads=64)
    )
    if comm.rank == 1:
        wait_until_entered(10 * (comm.size - 1))
        rpc.shutdown(graceful=False)
    else:
        for future in [rpc.rpc_async(1, wait_for_the_gate) for _ in range(10)]:
            with pytest.raises(WorkerLostError, match=r"'worker1' \(rank 1\) left the group"):
                future.wait()
        rpc.shutdown(graceful=False)
    gate.set()
    comm.Barrier()
    comm.Free()


# --- forks ---


def load(how):
    data = torch.utils.data.DataLoader(range(8), num_workers=2, batch_size=2, multiprocessing_context=how)
    return int(sum(batch.sum() for batch in data))


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_with_forked_workers(rpc_world):
    """pytorch#13787: the main program's and a callee's, while calls are under way."""
    to = (rpc_world.rank + 1) % rpc_world.size
    future = rpc.rpc_async(to, wait_for_the_gate, args=(5,))
    assert load("fork") == 28
    assert rpc.rpc_sync(to, load, args=("fork",)) == 28
    rpc.rpc_sync(to, open_the_gate)
    assert future.wait() == 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused_and_its_parent_goes_on(rpc_world):
    """sisl#275: a child has no threads and no MPI; it is told so instead of waiting for ever."""
    to = (rpc_world.rank + 1) % rpc_world.size
    rref, future = rpc.remote(to, list), rpc.rpc_async(to, wait_for_the_gate, args=(5,))
    pid = os.fork()
    if pid == 0:
        os._exit(sum(refuses(use) for use in (rref.to_here, future.wait, rpc.barrier, lambda: rpc.RRef(1))))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    rpc.rpc_sync(to, open_the_gate)
    assert (future.wait(), rref.to_here()) == (5, [])


def refuses(use):
    try:
        use()
    except NotInitializedError as error:
        return "was forked from an RPC worker" in str(error)
    return False


# --- what MPI refuses ---


@pytest.mark.mpi(min_size=2)
def test_shutdown_does_not_wait_for_a_message_that_mpi_refused(rpc_world, monkeypatch):
    def refuse(*_):
        raise MPI.Exception(MPI.ERR_OTHER)

    transport = get_current().agent.engine.transport
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_post", refuse)
        with pytest.raises(TransportError, match="MPI failed while sending"):
            rpc.rpc_sync(rpc_world.next, max, args=(1, 2))
    rpc.shutdown(timeout=LIMIT)
