"""Whole programs on ranks: how they end, and what they print; started from here by ``mpirun``."""

import subprocess
import sys

import pytest

from tests._ranks.launch import ROOT, mpirun_command, rank_environment, run_ranks

LIMIT = 60

CLEAN = """
import mpirpc as rpc
rpc.init_rpc()
rref = rpc.remote(1 - rpc.get_worker_info().id, list)
assert rpc.rpc_sync(1 - rpc.get_worker_info().id, max, args=(1, 2)) == 2
rpc.shutdown()
"""

NO_SHUTDOWN = """
import mpirpc as rpc
from mpi4py import MPI
rpc.init_rpc()
assert rpc.rpc_sync(1 - rpc.get_worker_info().id, max, args=(1, 2)) == 2
MPI.COMM_WORLD.Barrier()
"""

INTERACTIVE = """
import mpirpc as rpc
rpc.init_rpc()
rpc.rpc_sync(0, max, args=(1, 2)) + 40
1 / 0
rpc.remote(0, max, args=(3, 4)).to_here() + 50
rpc.shutdown()
print("end")
exit()
"""
"""The last line ends it: not every launcher passes the end of its input on."""


@pytest.fixture
def run(tmp_path):
    """Run a text as a program on ranks."""

    def start(text, ranks=2):
        program = tmp_path / "program.py"
        program.write_text(text, encoding="utf-8")
        return run_ranks(ranks, [str(program)], timeout=LIMIT, env={"PYTHONPATH": str(ROOT)})

    return start


def test_clean_program_prints_nothing(run):
    """pytorch#42637: an end in good order is no reason for warnings."""
    assert run(CLEAN) == (0, "", False)


def test_program_without_shutdown_is_warned_once_on_each_rank_and_ends_well(run):
    """pytorch#29148: no crash, no hang, the program's own exit status."""
    finished = run(NO_SHUTDOWN)
    assert (finished.rc, finished.timed_out) == (0, False), finished.output
    for rank in (0, 1):
        assert finished.output.count(f"'worker{rank}' (rank {rank}) ends without mpirpc.shutdown()") == 1
    assert "Traceback" not in finished.output


def test_rank_that_raises_ends_the_job_with_its_traceback(run):
    """mpi-sppy#852: the others do not wait for it."""
    finished = run(
        NO_SHUTDOWN + "if rpc.get_worker_info().id == 1: raise ValueError('on rank 1')\nrpc.shutdown()\n"
    )
    assert finished.rc != 0
    assert not finished.timed_out
    assert "ValueError: on rank 1" in finished.output


def test_interactive_python():
    """mpi4py#468: lines typed at a prompt, errors among them, are answered while RPC runs."""
    typed = subprocess.run(
        [*mpirun_command(1), sys.executable, "-i", "-q"],
        input=INTERACTIVE,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=rank_environment({"PYTHONPATH": str(ROOT)}),
        check=False,
    )
    assert typed.returncode == 0, typed.stderr
    assert typed.stdout.split() == ["42", "54", "end"]
    assert typed.stderr.count("Traceback") == 1
    assert "ZeroDivisionError" in typed.stderr
