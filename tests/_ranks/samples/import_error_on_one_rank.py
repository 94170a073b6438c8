"""Rank 1 cannot import this file."""

import pytest
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    raise RuntimeError("no import on rank 1")


@pytest.mark.mpi
def test_never_run():
    pass
