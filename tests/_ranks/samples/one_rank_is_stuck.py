"""Rank 1 never comes out of the second test."""

import threading

import pytest
from mpi4py import MPI


@pytest.mark.mpi
def test_fine():
    pass


@pytest.mark.mpi
@pytest.mark.patience(1)
def test_stuck():
    if MPI.COMM_WORLD.rank == 1:
        threading.Event().wait()
