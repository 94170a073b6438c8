"""Each rank has a test that no other has."""

import pytest
from mpi4py import MPI


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [MPI.COMM_WORLD.rank])
def test_of_one_rank(rank):
    pass
