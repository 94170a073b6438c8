"""The pytest plugin for users: a test file of theirs, run by plain pytest and by pytest under mpirun."""

import re
import signal
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
    above = str(tmp_path.parents[1])  # where pytest looks for old folders to remove
    assert len(set(rpc.all_gather(above).values())) == 2


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a test file of theirs."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_theirs.py").write_text(TESTS.replace("HANG", "45"))
    return folder


def run_pytest(folder, *argv):
    """Run plain pytest there; gives its exit status and what it wrote."""
    return end_of(start_pytest(folder, *argv))


def start_pytest(folder, *argv):
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", *argv],
        cwd=folder,
        env=rank_environment({**ENV, "PYTEST_DEBUG_TEMPROOT": str(folder)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(process):
    try:
        output, _ = process.communicate(timeout=300)
    except BaseException:
        process.kill()
        raise
    return process.returncode, output


def theirs(*names):
    return [f"test_theirs.py::{name}" for name in names]


@pytest.fixture(scope="module", autouse=True)
def hanging(folder):
    """A run of the test that hangs: it takes its time while the other tests of this file run."""
    process = start_pytest(folder, *theirs("test_hangs"))
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        end_of(process)


@pytest.fixture(scope="module")
def bad_run(folder):
    """A run of tests that fail; gives its exit status and what it wrote."""
    return run_pytest(folder, *theirs("test_one_rank_fails", "test_one_rank_dies"))


def test_good_outcomes_are_those_of_all_ranks(folder):
    names = ["test_call", "TestMany", "test_skipped", "test_known", "test_without_ranks"]
    status, output = run_pytest(folder, *theirs(*names))
    assert status == 0, output
    assert "3 passed, 1 skipped, 1 xfailed" in output, output


def test_a_failure_on_one_rank_fails_the_test_with_its_traceback(bad_run):
    status, output = bad_run
    assert status == 1, output
    assert "2 failed" in output, output
    output = output[output.index("_ test_one_rank_fails _") : output.index("_ test_one_rank_dies _")]
    assert "failed on rank(s) [1]" in output or "failed on rank(s) [0, 1]" in output, output
    first = output.index("--- rank 1 of 2 ---")
    assert "--- rank 0 of 2 ---" not in output[:first]
    assert ">       assert answer == 41\nE       assert 42 == 41" in output, output
    assert "said by rank 1" in output


def test_a_rank_that_dies_fails_the_test(bad_run):
    status, output = bad_run
    assert status == 1, output
    output = output[output.index("_ test_one_rank_dies _") :]
    assert "ended after setup; the launcher's exit status is" in output, output


def test_a_wrong_mark_is_refused(tmp_path):
    marks = {"word": '"two"', "misspelt": "2, tiemout=3", "zero": "0", "none": ""}
    for name, mark in marks.items():
        test = f"import pytest\n@pytest.mark.ranks({mark})\ndef test_it(): pass\n"
        (tmp_path / f"test_{name}.py").write_text(test)
    each = (
        "import sys, pytest\n"
        "for path in sys.argv[1:]:\n"
        "    status = pytest.main(['-p', 'no:cacheprovider', '-p', 'mpirpc.pytest_plugin', path])\n"
        "    print('status', int(status))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", each, *(f"test_{name}.py" for name in marks)],
        env=rank_environment(ENV),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.count(f"status {pytest.ExitCode.USAGE_ERROR.value}") == len(marks), done.stdout
    for name in marks:
        assert f"test_{name}.py::test_it: wrong mark: " in done.stderr


def test_the_example_of_the_documentation_runs(tmp_path):
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    conftest, example = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_double.py").write_text(example)
    status, output = run_pytest(tmp_path, "test_double.py")
    assert status == 0, output
    assert "1 passed" in output


def test_under_mpirun_tests_run_right_there(folder):
    """As pytest-mpi does it: pytest on every rank; tests for another number of ranks are skipped."""
    argv = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-k", "test_call or TestMany"]
    finished = run_ranks(2, [*argv, str(folder)], timeout=120, env=ENV)
    assert finished.rc == 0, finished.output
    assert finished.output.count("1 passed, 1 skipped") == 2, finished.output


def test_a_hang_ends_with_the_stacks_of_the_ranks(hanging):
    status, output = end_of(hanging)
    assert status == 1, output
    assert "--- rank 0 of 2 ---\nnot done in 45 s; stopped after setup" in output, output
    assert "in test_hangs" in output
