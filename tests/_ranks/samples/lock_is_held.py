"""Rank 1 is stuck inside MPI with the interpreter lock held, so that no Python thread of its can speak."""

import ctypes

import pytest
from mpi4py import MPI


@pytest.mark.mpi
@pytest.mark.patience(1)
def test_stuck_with_the_lock_held():
    if MPI.COMM_WORLD.rank == 1:
        ctypes.PyDLL(None).sleep(600)
