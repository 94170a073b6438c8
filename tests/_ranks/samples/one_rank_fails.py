"""Rank 1 fails alone: in a call, in a setup, in a teardown, by a skip; then all is well."""

import pytest
from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank


def barrier():
    request = MPI.COMM_WORLD.Ibarrier()
    request.Wait()


@pytest.fixture
def bad_setup():
    assert RANK != 1, "setup of rank 1"


@pytest.fixture
def bad_teardown():
    yield
    assert RANK != 1, "teardown of rank 1"


@pytest.mark.mpi
def test_call():
    print(f"printed by rank {RANK}")
    assert RANK != 1, "call of rank 1"


@pytest.mark.mpi
def test_after_failure_ranks_meet():
    barrier()


@pytest.mark.mpi
def test_setup(bad_setup):
    barrier()  # must not be reached: rank 1 does not come


@pytest.mark.mpi
def test_teardown(bad_teardown):
    barrier()


@pytest.mark.mpi
def test_skip_on_one_rank():
    if RANK == 1:
        pytest.skip("only rank 1")


@pytest.mark.mpi
def test_skip_on_all_ranks():
    pytest.skip("everybody")


@pytest.mark.mpi
@pytest.mark.xfail(reason="known to fail on all ranks")
def test_known_failure():
    raise AssertionError("known")


@pytest.mark.mpi
def test_last():
    barrier()
