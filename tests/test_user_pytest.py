"""The pytest plugin for users: a test file of theirs, run by plain pytest and by pytest under mpirun."""

import re
import subprocess
import sys

import pytest

from tests._ranks.launch import ROOT, rank_environment, run_ranks

ENV = {"PYTHONPATH": str(ROOT)}
CONFTEST = 'pytest_plugins = ["mpirpc.pytest_plugin"]\n'

TESTS = """
import os
import signal

import pytest

import mpirpc as rpc


def double(x):
    return 2 * x


@pytest.mark.ranks(2)
def test_call(rpc_world, tmp_path):
    assert (rpc_world.size, rpc_world.name) == (2, f"worker{rpc_world.rank}")
    if rpc_world.rank == 0:
        assert rpc.rpc_sync(rpc_world.next, double, args=(21,)) == 42
    rpc_world.barrier()


class TestMany:
    @pytest.mark.ranks(3)
    @pytest.mark.rpc_options(num_worker_threads=3)
    @pytest.mark.parametrize("x", [5])
    def test_options_and_parameters(self, rpc_world, x):
        assert rpc.rpc_sync(rpc_world.next, double, args=(x,)) == 10


@pytest.mark.ranks(2)
def test_one_rank_fails(rpc_world):
    print(f"said by rank {rpc_world.rank}")
    answer = 41 + rpc_world.rank
    assert answer == 41
    rpc.rpc_sync(0, double, args=(1,))


@pytest.mark.ranks(2)
def test_one_rank_dies(rpc_world):
    if rpc_world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rpc_world.barrier()


@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")


@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2)
def test_known():
    assert False


@pytest.mark.ranks(2, timeout=HANG)
def test_hangs(rpc_world):
    if rpc_world.rank == 0:
        signal.pause()


def test_without_ranks():
    assert "MPIRPC_PYTEST_FOLDER" not in os.environ
"""


@pytest.fixture
def suite(tmp_path):
    """A folder with a test file; gives what runs tests of it by plain pytest."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_theirs.py").write_text(TESTS.replace("HANG", "45"))

    def run(*names):
        argv = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider"]
        argv += [f"test_theirs.py::{name}" for name in names]
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env=rank_environment(ENV),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_good_outcomes_are_those_of_all_ranks(suite):
    names = ["test_call", "TestMany", "test_skipped", "test_known", "test_without_ranks"]
    status, output = suite(*names)
    assert status == 0, output
    assert "3 passed, 1 skipped, 1 xfailed" in output, output


def test_a_failure_on_one_rank_fails_the_test_with_its_traceback(suite):
    status, output = suite("test_one_rank_fails")
    assert status == 1, output
    assert "failed on rank(s) [1]" in output or "failed on rank(s) [0, 1]" in output, output
    first = output.index("--- rank 1 of 2 ---")
    assert "--- rank 0 of 2 ---" not in output[:first]
    assert ">       assert answer == 41\nE       assert 42 == 41" in output, output
    assert "said by rank 1" in output


def test_a_rank_that_dies_fails_the_test(suite):
    status, output = suite("test_one_rank_dies")
    assert status == 1, output
    assert "ended after setup; the launcher's exit status is" in output, output


def test_a_hang_ends_with_the_stacks_of_the_ranks(suite):
    status, output = suite("test_hangs")
    assert status == 1, output
    assert "--- rank 0 of 2 ---\nnot done in 45 s; stopped after setup" in output, output
    assert "in test_hangs" in output


@pytest.mark.parametrize("mark", ['"two"', "2, tiemout=3", "0", ""])
def test_a_wrong_mark_is_refused(tmp_path, mark):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    test = f"import pytest\n@pytest.mark.ranks({mark})\ndef test_it(): pass\n"
    (tmp_path / "test_wrong.py").write_text(test)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(argv, env=rank_environment(ENV), capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_wrong.py::test_it: wrong mark: " in done.stderr


def test_the_example_of_the_documentation_runs(tmp_path):
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    conftest, example = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_double.py").write_text(example)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_double.py"]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env=rank_environment(ENV),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_under_mpirun_tests_run_right_there(tmp_path):
    """As pytest-mpi does it: pytest on every rank; tests for another number of ranks are skipped."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_theirs.py").write_text(TESTS.replace("HANG", "45"))
    argv = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-k", "test_call or TestMany"]
    finished = run_ranks(2, [*argv, str(tmp_path)], timeout=120, env=ENV)
    assert finished.rc == 0, finished.output
    assert finished.output.count("1 passed, 1 skipped") == 2, finished.output
