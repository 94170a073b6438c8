"""The ranks themselves, and that a group opens, serves and closes around a test."""

import pytest
import torch
from mpi4py import MPI

import mpirpc as rpc


@pytest.mark.mpi(min_size=2)
def test_ranks_share_one_world():
    comm = MPI.COMM_WORLD.Dup()
    gathered = bytearray(comm.size)
    comm.Allgather([bytes([comm.rank]), MPI.BYTE], [gathered, MPI.BYTE])
    size = comm.size
    comm.Free()
    assert list(gathered) == list(range(size))


@pytest.mark.mpi(min_size=2)
def test_ranks_share_no_temporary_root(rpc_world, tmp_path):
    """pytest's own root is one for all, where ranks would remove each other's folders at their end."""
    user_folder = tmp_path.parents[1]
    assert user_folder.name.startswith("pytest-of-")
    assert len(set(rpc.all_gather(str(user_folder)).values())) == rpc_world.size


@pytest.mark.mpi(min_size=2)
def test_every_rank_calls_every_rank(rpc_world):
    for name in rpc_world.names:
        total = rpc.rpc_sync(name, torch.add, args=(torch.ones(2), rpc_world.rank))
        assert torch.equal(total, torch.full((2,), 1.0 + rpc_world.rank))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("round_number", range(3))
def test_group_opens_again_and_again(rpc_world, round_number):
    rref = rpc.remote(rpc_world.names[rpc_world.rank - 1], torch.ones, args=(2,))
    assert rref.to_here().sum() == 2
    rpc_world.barrier()
