"""Unit tests for mpirpc._core.launcher: who started a rank, and which starts are wrong."""

import pytest

from mpirpc._core.launcher import find_wrong_belief, find_wrong_start, library_name, read_launcher

OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
PMI2 = {**SLURM, "PMI_SIZE": "4", "PMI_RANK": "1", "SLURM_MPI_TYPE": "pmi2"}
PMIX = {**SLURM, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_MPI_TYPE": "pmix"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}
DAEMON = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
"""What a rank of mpirun inside an allocation has of its daemon."""


@pytest.mark.parametrize(
    ("environ", "name", "size", "rank", "by_mpi"),
    [
        ({}, "none", 0, -1, False),
        ({"SLURM_NTASKS": "4"}, "none", 0, -1, False),
        (OMPI, "mpirun (Open MPI)", 4, 1, True),
        ({**OMPI, **DAEMON}, "mpirun (Open MPI)", 4, 1, True),
        (HYDRA, "mpirun (hydra: MPICH or Intel MPI)", 4, 1, True),
        ({**HYDRA, **DAEMON}, "mpirun (hydra: MPICH or Intel MPI)", 4, 1, True),
        (SLURM, "srun without --mpi", 4, 1, False),
        (PMI2, "srun --mpi=pmi2", 4, 1, True),
        (PMIX, "srun --mpi=pmix", 4, 1, True),
        (TORCHRUN, "torchrun", 4, 1, False),
        ({**OMPI, **TORCHRUN}, "torchrun", 4, 1, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "a PMI launcher", 4, 1, True),
        ({"PMIX_RANK": "3"}, "a PMIx launcher", 0, 3, True),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "mpirun (Open MPI)", 0, -1, True),
    ],
)
def test_the_launcher_is_found_by_its_variables(environ, name, size, rank, by_mpi):
    found = read_launcher(environ)
    assert (found.name, found.size, found.rank, found.by_mpi) == (name, size, rank, by_mpi)


@pytest.mark.parametrize("environ", [{}, OMPI, HYDRA, PMI2, PMIX, {**OMPI, **DAEMON}, TORCHRUN])
def test_a_job_of_which_mpi_knows_is_right(environ):
    assert find_wrong_start(environ, 1, 4, "MPI") == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4"},
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "8"},
    ],
)
def test_a_job_of_one_rank_is_right(environ):
    assert find_wrong_start(environ, 0, 1, "MPI") == ""


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            SLURM,
            "srun without --mpi started 4 ranks, but MPI (MPICH 5) sees 1: they are 4 separate jobs; use",
        ),
        (
            PMI2,
            "srun --mpi=pmi2 started 4 ranks, but MPI (MPICH 5) sees 1: they are 4 separate jobs; use",
        ),
        (PMIX, "srun --mpi=pmix started 4 ranks, but MPI (MPICH 5) sees 1"),
        (
            OMPI,
            "mpirun (Open MPI) started 4 ranks, but MPI (MPICH 5) sees 1: mpi4py has loaded another",
        ),
        (
            HYDRA,
            "mpirun (hydra: MPICH or Intel MPI) started 4 ranks, but MPI (MPICH 5) sees 1: mpi4py has",
        ),
        (
            TORCHRUN,
            "torchrun says this is rank 1 of 4, but MPI says 0 of 1: torchrun tells MPI nothing; start",
        ),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 is set, but MPI sees 1 rank: MPI did not start this job; start",
        ),
    ],
)
def test_ranks_that_mpi_does_not_know_of_are_told_with_the_remedy(environ, says):
    assert find_wrong_start(environ, 0, 1, "MPICH 5").startswith(says)


def test_torchrun_under_mpirun_is_told():
    assert "MPI says 1 of 2" in find_wrong_start({**OMPI, **TORCHRUN}, 1, 2, "MPI")


@pytest.mark.parametrize(
    ("environ", "name", "given", "size", "fact", "says"),
    [
        ({}, "world_size", 4, 1, 1, "runs without a launcher; start it with: mpirun -n 4 python"),
        ({}, "rank", 1, 1, 0, "runs without a launcher; start it with: mpirun -n 2 python"),
        (OMPI, "world_size", 8, 4, 4, "start more ranks: mpirun -n 8 python"),
        (OMPI, "world_size", 2, 4, 4, "leave it out"),
        (OMPI, "rank", 0, 4, 1, "leave it out"),
    ],
)
def test_a_wrong_belief_is_told_with_the_remedy(environ, name, given, size, fact, says):
    told = find_wrong_belief(environ, name, given, size, fact)
    assert told.startswith(f"{name}={given} was given, but MPI says {fact}; ")
    assert says in told


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@x, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS\n", "Intel(R) MPI Library 2021.13 for Linux* OS"),
    ],
)
def test_library_name(text, name):
    assert library_name(text) == name
