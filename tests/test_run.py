"""``python -m mpirpc run`` and ``run_main``: however a rank ends, the job ends, with the right status."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests._ranks.launch import ROOT, is_open_mpi, mpirun_command, rank_environment, run_ranks

ENV = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", "PYTHONWARNINGS": "default"}
PROGRAM = "tests/programs/ending.py"
LIMIT = 120


def run(how, others, *more):
    """Run the program under ``python -m mpirpc run``."""
    return run_ranks(2, ["-m", "mpirpc", "run", *more, PROGRAM, how, others], timeout=LIMIT, env=ENV)


def tracebacks(output):
    """How many tracebacks were printed; a chain of two is two."""
    return output.count("Traceback (most recent call last)")


# --- a rank fails ---


def check_one_report(finished):
    assert (finished.rc, finished.timed_out) == (1, False), finished.output
    report = r"""mpirpc: rank 1 of 2, worker 'name1', host \S+, failed; the job is ended
Traceback \(most recent call last\):
(?:  .*\n)+KeyError: 'missing'

The above exception was the direct cause of the following exception:

Traceback \(most recent call last\):
  File "[^\n]*ending.py", line \d+, in <module>
(?:  .*\n)+ValueError: this is wrong
in two lines
"""
    assert re.search(report, finished.output), finished.output
    assert tracebacks(finished.output) == 2, finished.output
    assert "is at its end" not in finished.output


@pytest.mark.parametrize("others", ["rpc", "shutdown", "collective"])
def test_an_exception_ends_the_job_wherever_the_others_are(others):
    check_one_report(run("raise", others))


def test_when_all_ranks_fail_one_of_them_tells():
    finished = run("raise", "same")
    assert finished.rc == 1, finished.output
    assert len(re.findall("failed; the job is ended", finished.output)) == 1, finished.output
    assert tracebacks(finished.output) == 2, finished.output


def test_run_main_in_a_program_does_the_same():
    finished = run_ranks(2, [PROGRAM, "raise", "rpc", "run_main"], timeout=LIMIT, env=ENV)
    assert finished.rc == 1, finished.output
    assert "mpirpc: rank 1 of 2, worker 'name1'" in finished.output
    assert tracebacks(finished.output) == 2, finished.output


def test_run_main_under_run_is_the_same_as_main():
    finished = run("ok", "same", "--")
    assert finished.rc == 0, finished.output
    assert finished.output.count("is at its end") == 2


def test_a_script_that_is_not_there():
    finished = run_ranks(2, ["-m", "mpirpc", "run", "no_such.py"], timeout=LIMIT, env=ENV)
    assert finished.rc == 1, finished.output
    assert "FileNotFoundError" in finished.output
    assert tracebacks(finished.output) == 1, finished.output


def test_no_program_is_told_how():
    finished = run_ranks(1, ["-m", "mpirpc", "run"], timeout=LIMIT, env=ENV)
    assert finished.rc == 2, finished.output
    assert "mpirun -n 4 python -m mpirpc run script.py" in finished.output


# --- exit statuses ---


@pytest.mark.parametrize(
    ("how", "others", "status"),
    [("ok", "same", 0), ("exit0", "same", 0), ("exit3", "same", 3), ("exit3", "rpc", 3), ("text", "same", 1)],
)
def test_exit_status(how, others, status):
    finished = run(how, others)
    assert (finished.rc, finished.timed_out) == (status, False), finished.output
    assert tracebacks(finished.output) == 0, finished.output
    assert finished.output.count("what python prints") == (2 if how == "text" else 0)
    assert ("the others do not" in finished.output) == (others == "rpc")


# --- what a script finds ---


def test_a_script_and_a_module_find_what_python_gives_them(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    (tmp_path / "prog.py").write_text(
        "import sys, beside, pickle\n"
        "def f(): pass\n"
        "assert pickle.loads(pickle.dumps(f)) is f\n"
        "import __main__; assert __main__.f is f\n"
        "print(__name__, sys.argv[1:], __file__.endswith('prog.py'))\n"
    )
    said = "__main__ ['a', '--flag', '-m'] True"
    for program in ([str(tmp_path / "prog.py")], ["--", str(tmp_path / "prog.py")], ["-m", "prog"]):
        finished = run_ranks(
            2,
            ["-m", "mpirpc", "run", *program, "a", "--flag", "-m"],
            timeout=LIMIT,
            env={**ENV, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        )
        assert finished.rc == 0, finished.output
        assert finished.output.count(said) == 2, finished.output


# --- signals ---


@contextmanager
def started(how, others, *options, ready):
    """Start the program and wait until so many ranks are ready; gives the launcher and the ranks."""
    launcher = subprocess.Popen(
        [*mpirun_command(2), sys.executable, "-m", "mpirpc", "run", *options, PROGRAM, how, others],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=rank_environment(ENV),
        start_new_session=True,
    )
    try:
        seen = 0
        while seen < ready:
            line = launcher.stdout.readline()
            assert line, "the program ended before it was ready"
            seen += line.count(b"ready")
        ranks = [
            child
            for child in psutil.Process(launcher.pid).children(recursive=True)
            if child.cmdline()[1:4] == ["-m", "mpirpc", "run"]
        ]
        assert len(ranks) == 2
        yield launcher, sorted(ranks, key=lambda child: child.pid)
    finally:
        launcher.kill()
        launcher.communicate()


def end_of(launcher):
    """Wait for the end; give output and exit status."""
    output = launcher.communicate(timeout=LIMIT)[0].replace(b"\0", b"").decode(errors="replace")
    return output, launcher.returncode


def check_all_saved(output):
    for rank in (0, 1):
        assert f"saved by rank {rank}" in output
        assert f"saved more by rank {rank}" in output
    assert output.count("unwound") == 2
    assert output.count("ZeroDivisionError") == 2  # a callback's error is told and stops no other
    assert output.index("unwound") < output.index("saved by")
    assert "is at its end" not in output


@pytest.mark.parametrize("number", [15, 2], ids=["SIGTERM", "SIGINT"])
def test_signalled_ranks_save_and_end_with_the_signals_status(number):
    with started("callback", "same", ready=2) as (launcher, ranks):
        for rank in ranks:
            rank.send_signal(number)
        output, status = end_of(launcher)
    check_all_saved(output)
    assert status == 128 + number


def test_a_further_signal_passes_through_the_launcher():
    """Open MPI's and MPICH's mpirun hand SIGUSR1 on to the ranks, and do not end them by themselves."""
    with started("callback", "same", "--signal", "USR1", ready=2) as (launcher, _):
        os.kill(launcher.pid, 10)
        output, status = end_of(launcher)
    check_all_saved(output)
    assert status == 138


def test_a_rank_that_saves_for_long_is_waited_for():
    """The other rank is done at once; it used to end the job after MEET_PATIENCE."""
    with started("slowly", "shutdown", "--signal", "USR1", ready=1) as (launcher, _):
        os.kill(launcher.pid, 10)
        output, status = end_of(launcher)
    assert "saved by rank 1" in output
    assert status == 138


def test_a_signal_to_one_rank_ends_all():
    with started("callback", "same", "--grace", "8", ready=2) as (launcher, ranks):
        ranks[1].send_signal(15)
        output, status = end_of(launcher)
    assert "saved by rank 1" in output
    assert status == 143


def test_a_rank_that_is_stuck_in_c_is_ended_without_callbacks():
    with started("stuck", "rpc", "--grace", "3", ready=1) as (launcher, ranks):
        for rank in ranks:
            rank.send_signal(15)
        output, status = end_of(launcher)
    assert "rank 1 got signal 15 and does not come back to Python" in output
    assert "saved" not in output
    assert status == 143


@pytest.mark.parametrize("number", [15, 2], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_ends_all(number):
    with started("callback", "same", ready=2) as (launcher, ranks):
        os.kill(launcher.pid, number)
        output, status = end_of(launcher)
        psutil.wait_procs(ranks, timeout=LIMIT)
        assert not any(rank.is_running() for rank in ranks)
    if is_open_mpi():  # it ends its ranks, and hears no more of them
        assert status == 1
    else:
        check_all_saved(output)
        assert status == 128 + number
