"""Tests that treat their RPC group badly; the group of the next test opens all the same."""

import pytest
import torch
from mpi4py import MPI

import mpirpc as rpc
from tests._ranks.world import rpc_world

__all__ = ["rpc_world"]

KEPT = []


@pytest.mark.mpi
def test_fails_on_rank_1_while_others_call(rpc_world):
    assert rpc_world.rank != 1, "rank 1 gives up"
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))


@pytest.mark.mpi
@pytest.mark.rpc_options(num_worker_threads=2)
def test_all_is_well(rpc_world):
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2


@pytest.mark.mpi
def test_keeps_an_rref(rpc_world):
    if rpc_world.rank == 0:
        KEPT.append(rpc.remote("worker1", torch.ones, args=(1,)))
        KEPT[0].to_here()


@pytest.mark.mpi
def test_closes_by_itself(rpc_world):
    KEPT.clear()
    rpc.shutdown()


@pytest.mark.mpi
def test_last(rpc_world):
    assert MPI.COMM_WORLD.size == rpc_world.size
