"""Jobs that were started wrongly: ``init_rpc`` and ``doctor`` refuse each with the remedy, and none hangs.

Launchers that this machine lacks are played by the variables that their ranks see (docs/running-on-slurm.md).
"""

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests._ranks.launch import ROOT, is_open_mpi, rank_environment, run_ranks

LIMIT = 120

SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}
OTHER_MPIRUN = (
    {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}
    if is_open_mpi()
    else {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
)
"""What the ranks see that the other library's mpirun starts."""

INIT = "import mpirpc; mpirpc.init_rpc({}); print('started'); mpirpc.shutdown()"

REFUSED = """
import mpirpc
for arguments in {}:
    try:
        mpirpc.init_rpc(**arguments)
    except mpirpc.errors.ConfigurationError as error:
        print("ConfigurationError:", error, flush=True)
"""

DOCTOR = "from mpirpc.__main__ import main; raise SystemExit(main(['doctor']))"

WRONG = [
    (
        SRUN,
        "srun without --mpi started 4 ranks, but MPI",
        "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)",
    ),
    (
        TORCHRUN,
        "torchrun says this is rank 1 of 4, but MPI says 0 of 1",
        "start it without torchrun: mpirun -n 4",
    ),
    (OTHER_MPIRUN, "started 4 ranks, but MPI", "start with the mpirun that belongs to it"),
    (
        {"RANK": "1", "WORLD_SIZE": "4"},
        "WORLD_SIZE=4 is set, but MPI sees 1 rank",
        "start it with: mpirun -n 4",
    ),
]
IDS = ["srun", "torchrun", "other mpirun", "no launcher"]


def alone(argv, env):
    """Run Python without a launcher, in an environment that looks as if there were one."""
    return subprocess.run(
        [sys.executable, *argv],
        env=rank_environment({"PYTHONPATH": str(ROOT), **env}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@functools.cache
def init_and_doctor(env):
    """Run both alone in this environment, given as pairs, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(alone, [["-c", INIT.format("")], ["-m", "mpirpc", "doctor"]], [dict(env)] * 2))


@pytest.mark.parametrize(("env", "problem", "remedy"), WRONG, ids=IDS)
def test_init_rpc_refuses_ranks_that_mpi_does_not_know_of(env, problem, remedy):
    finished, _ = init_and_doctor(tuple(env.items()))
    assert finished.returncode == 1
    assert "ConfigurationError" in finished.stderr
    assert problem in finished.stderr
    assert remedy in finished.stderr


@pytest.mark.parametrize(("env", "problem", "remedy"), WRONG, ids=IDS)
def test_doctor_refuses_ranks_that_mpi_does_not_know_of(env, problem, remedy):
    _, finished = init_and_doctor(tuple(env.items()))
    assert finished.returncode == 1, finished.stdout + finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("FAULT")]
    assert problem in line
    assert remedy in finished.stdout
    assert "all 1 rank(s) answer" not in finished.stdout


def test_a_program_for_several_ranks_without_a_launcher():
    refused = [{"world_size": 4}, {"name": "w1", "rank": 1}]
    finished = alone(["-c", REFUSED.format(refused)], {})
    assert (
        "world_size=4 was given, but MPI says 1; it runs without a launcher; start it with: mpirun -n 4"
        in finished.stdout
    ), finished.stderr
    assert (
        "rank=1 was given, but MPI says 0; it runs without a launcher; start it with: mpirun -n 2"
        in finished.stdout
    )


def test_a_world_of_another_size_is_refused_on_all_ranks():
    sizes = {3: "start more ranks: mpirun -n 3", 1: "leave it out, or give what MPI says"}
    program = REFUSED.format([{"world_size": size} for size in sizes])
    finished = run_ranks(2, ["-c", program], timeout=LIMIT, env={"PYTHONPATH": str(ROOT)})
    assert (finished.rc, finished.timed_out) == (0, False), finished.output
    assert finished.output.count("ConfigurationError: ") == 4, finished.output
    for size, says in sizes.items():
        assert finished.output.count(f"rank 0: world_size={size} was given, but MPI says 2; {says}") == 2


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_too_low_a_thread_level_is_refused(level):
    setting = f"import mpi4py; mpi4py.rc.thread_level = '{level}'\n"
    argv = ["-c", setting + REFUSED.format([{}]) + DOCTOR]
    finished = run_ranks(2, argv, timeout=LIMIT, env={"PYTHONPATH": str(ROOT)})
    assert (finished.rc, finished.timed_out) == (1, False), finished.output
    assert finished.output.count("ConfigurationError: ") == 2, finished.output
    assert "mpirpc needs MPI_THREAD_SERIALIZED" in finished.output
    assert "remove mpi4py.rc.thread_level settings" in finished.output
    assert "hint: remove mpi4py.rc.thread_level" in finished.output


def test_without_mpi_is_refused():
    finished = alone(["-c", "import mpi4py; mpi4py.rc.initialize = False; " + INIT.format("")], {})
    assert finished.returncode == 1
    assert "ConfigurationError: MPI is not initialized" in finished.stderr


FORKED = """
import multiprocessing, mpirpc
def child():
    try:
        mpirpc.init_rpc("child")
    except mpirpc.errors.ConfigurationError as error:
        print(error, flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


def test_a_process_forked_from_a_rank_is_refused():
    finished = alone(["-c", FORKED], {})
    assert finished.returncode == 0, finished.stderr
    assert "forked from an MPI rank" in finished.stdout
    assert "hint: start all ranks with mpirun" in finished.stdout
