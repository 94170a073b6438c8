"""The failure table of docs/design/failure.md: what fails, in the middle of what, and how it comes out.

Each job is started with a time limit that no cell may reach. A plain run tries a part of the table; with
``MPIRPC_TEST_FAILURES=1`` all of it runs.
"""

import os
import re
import subprocess
import sys
import threading

import pytest

from tests._ranks.launch import ROOT, is_open_mpi, mpirun_command, rank_environment, run_ranks

PROGRAM = "tests/programs/failing.py"
STOPPING = "tests/programs/stopping.py"
ENV = {"PYTHONPATH": str(ROOT)}
LIMIT = 120
MOMENTS = ("call", "fetch", "backward", "shutdown")

WITH_FT = pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI survives the death of a rank")
ALL = os.environ.get("MPIRPC_TEST_FAILURES") == "1"


def cells(*quick):
    """A row of the table; the moments named run always."""
    later = pytest.mark.skipif(not ALL, reason="the whole table: set MPIRPC_TEST_FAILURES=1")
    columns = [pytest.param(moment, marks=() if moment in quick else later) for moment in MOMENTS]
    return pytest.mark.parametrize("moment", columns)


def run(cause, moment, *, before=(), launcher=()):
    """Run the program on two ranks; with Open MPI's fault tolerance on three."""
    argv = [*before, PROGRAM, cause, moment]
    if not launcher:
        return run_ranks(2, argv, timeout=LIMIT, env=ENV)
    done = start(3, argv, launcher)
    return done.returncode, done.stdout + done.stderr


def start(num_ranks, argv, launcher):
    """Run a program with further options of the launcher."""
    return subprocess.run(
        [*mpirun_command(num_ranks), *launcher, sys.executable, *argv],
        cwd=ROOT,
        env=rank_environment(ENV),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def said(output, what):
    """What worker 0 told of something."""
    found = re.findall(rf"^\[{re.escape(what)}\] (.*)$", output, re.MULTILINE)
    assert len(found) == 1, f"{what}: {found}\n{output}"
    return found[0]


def check_job_ended(finished):
    """Nobody went on, and the launcher says that something went wrong."""
    assert not finished.timed_out, finished.output
    assert finished.rc != 0, finished.output
    assert "worker1 is reached" in finished.output
    assert "goes on" not in finished.output
    assert "is at its end" not in finished.output


# --- kill -9 ---


@cells("backward")
def test_kill_under_plain_mpi_ends_the_job(moment):
    check_job_ended(run("kill", moment))


@WITH_FT
@cells("call", "shutdown")
def test_kill_under_ulfm_is_survived(moment):
    status, output = run("kill", moment, launcher=("--with-ft", "ulfm"))
    assert status == 0, output
    check_survived(output, moment, {"call": "hold", "fetch": "to_here"})


def check_survived(output, moment, functions):
    gone = r"WorkerLostError: 'worker1' \(rank 1\) has died: no response to request \d+ \(.*{}.*\)"
    if moment == "shutdown":
        assert said(output, "shutdown") == "None"
    else:
        if moment == "backward":
            found = said(output, "backward")
            assert found.startswith("WorkerLostError: a backward pass needs 'worker1' (rank 1)"), output
        else:
            assert re.fullmatch(gone.format(functions[moment]), said(output, moment)), output
        check_the_rest(output, gone)
    assert said(output, "shutdown of worker2") == "None"
    assert "worker0 is at its end" in output
    assert "worker2 is at its end" in output


def check_the_rest(output, gone):
    assert re.fullmatch(gone.format("abs"), said(output, "new call")), output
    assert re.fullmatch(gone.format("to_here"), said(output, "its rref")), output
    assert said(output, "its rref, passed on") == "RRef"
    assert said(output, "a backward pass without it") == "2.0"
    assert "'worker1' left or died" in said(output, "barrier of all")
    assert said(output, "barrier of the rest") == "(None, None)"
    here, there = eval(said(output, "facts here")), eval(said(output, "facts there"))
    assert there.pop("open_calls") == here.pop("open_calls") + 1  # the question itself
    assert here == there
    assert here.pop("lost_workers") == ["worker1"]
    assert set(here.values()) == {0}
    assert said(output, "shutdown of worker0") == "None"


@WITH_FT
def test_a_training_goes_on_without_a_rank_that_was_killed():
    done = start(4, ["examples/survive.py"], launcher=("--with-ft", "ulfm"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 12: .*'worker1' \(rank 1\)", done.stdout), done.stdout
    assert "goes on from step 10 with ['worker2', 'worker3']" in done.stdout
    expected = "OK: the losses after losing worker1 differ from those without by 0.0"
    assert done.stdout.splitlines()[-1] == expected


@WITH_FT
def test_finalize_is_not_waited_for_after_a_death(tmp_path):
    """`MPI_Finalize` waits for all ranks, also for one that is dead; here for one that never comes there."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys\n"
        "import mpirpc\n"
        "from mpirpc._core import mpi_faults\n"
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank:\n"
        "    signal.pause()\n"
        "mpi_faults._last_step.prepare()\n"
        "sys.exit(3)\n"
    )
    finished = run_ranks(2, [str(program)], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.timed_out) == (3, False), finished.output


# --- a peer that is stopped (SIGSTOP) and goes on ---


def test_a_stopped_peer_costs_timeouts_only():
    finished = run_ranks(3, ["-m", "tests.programs.stopping"], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.timed_out) == (0, False), finished.output
    for moment in ("call", "fetch", "backward in time", "shutdown"):
        assert said(finished.output, moment).startswith("RpcTimeoutError: "), finished.output
    assert "no answer yet from 'worker1' (rank 1)" in said(finished.output, "backward in time")
    expected = {"call elsewhere": "2", "call afterwards": "1", "fetch afterwards": "3"}
    expected |= {
        "backward waits": "True",
        "backward": "None",
        "gradient": "2.0",
        "shutdown of worker0": "None",
    }
    for what, result in expected.items():
        assert said(finished.output, what) == result
    for rank in (1, 2):
        assert "cannot be graceful: 'worker0' (rank 0)" in said(finished.output, f"shutdown of worker{rank}")
    assert finished.output.count("is at its end") == 3


# --- signals to the launcher: Ctrl-C (SIGINT) and SIGTERM ---


def signal_launcher(number, argv):
    """Start a program, signal its launcher when worker 1 is reached, wait for the end."""
    process = subprocess.Popen(
        [*mpirun_command(2), sys.executable, *argv],
        cwd=ROOT,
        env=rank_environment({**ENV, "PYTHONUNBUFFERED": "1"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(LIMIT, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "worker1 is reached" in line:
                process.send_signal(number)
        process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    assert process.returncode != -9, "ended by the watchdog: " + "".join(lines)
    return process.returncode, "".join(lines)


@pytest.mark.parametrize("number", [2, 15], ids=["SIGINT", "SIGTERM"])
@cells("fetch")
def test_a_signal_to_the_launcher_ends_the_job(number, moment):
    status, output = signal_launcher(number, [PROGRAM, "wait", moment])
    assert status != 0
    assert "worker1 is reached" in output
    assert "is at its end" not in output


# --- an exception in one rank ---


@pytest.mark.parametrize("before", [(), ("-m", "mpirpc", "run")], ids=["python", "mpirpc run"])
@cells("shutdown")
def test_an_exception_in_one_rank_ends_the_job(before, moment):
    finished = run("raise", moment, before=before)
    check_job_ended(finished)
    assert finished.output.count("ValueError: worker1 is broken") == 1, finished.output


@WITH_FT
@cells()
def test_an_exception_in_one_rank_is_survived_under_ulfm(moment):
    _, output = run("raise", moment, launcher=("--with-ft", "ulfm"))
    assert output.count("ValueError: worker1 is broken") == 1, output
    check_survived(output, moment, {"call": "hold", "fetch": "to_here"})


def test_an_exception_before_init_rpc_ends_the_job_under_run(tmp_path):
    finished = run_ranks(2, ["-m", "mpirpc", "run", broken_start(tmp_path)], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.timed_out) == (1, False), finished.output
    assert finished.output.count("ZeroDivisionError: ") == 1, finished.output


def broken_start(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(
        "import mpirpc\nfrom mpi4py import MPI\n1 / (1 - MPI.COMM_WORLD.rank)\nmpirpc.init_rpc()\n"
    )
    return str(program)


# --- a program that ends without shutdown ---


@cells("call")
def test_exit_without_shutdown_fails_the_others_calls(moment):
    finished = run("exit", moment)
    assert (finished.rc, finished.timed_out) == (0, False), finished.output
    assert "'worker1' (rank 1) ends without mpirpc.shutdown()" in finished.output
    told = {"backward": "a backward pass needs 'worker1' (rank 1)", "shutdown": "left without waiting"}
    expected = told.get(moment, "'worker1' (rank 1) left the group without waiting for it")
    assert said(finished.output, moment).startswith("WorkerLostError: "), finished.output
    assert expected in said(finished.output, moment)
    assert "worker0 is at its end" in finished.output


# --- MPI's own end, and Ctrl-C at the start ---

FINALIZE = """
import mpirpc as rpc
from mpi4py import MPI
rpc.init_rpc()
rpc.rpc_sync(1 - MPI.COMM_WORLD.rank, abs, args=(-1,))
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
try:
    rpc.rpc_sync(0, abs, args=(-1,))
except rpc.RpcError as error:
    print(f"afterwards: {type(error).__name__}", flush=True)
"""


def test_finalize_by_the_program_stops_rpc(tmp_path):
    """MPI would end the process at the engine's next look at the network."""
    (tmp_path / "finalize.py").write_text(FINALIZE)
    finished = run_ranks(2, [str(tmp_path / "finalize.py")], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.timed_out) == (0, False), finished.output
    assert finished.output.count("afterwards: NotInitializedError") == 2, finished.output


BEFORE = """
import mpirpc as rpc
from mpi4py import MPI
if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    raise ValueError("not even begun")
rpc.init_rpc()
print("this rank goes on")
"""


@pytest.mark.parametrize("before", [(), ("-m",)], ids=["script", "module"])
def test_an_exception_before_init_rpc_ends_the_job(tmp_path, before):
    (tmp_path / "before.py").write_text(BEFORE)
    program = "before" if before else str(tmp_path / "before.py")
    finished = run_ranks(2, [*before, program], timeout=LIMIT, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert (finished.rc, finished.timed_out) == (1, False), finished.output
    assert finished.output.count("ValueError: not even begun") == 1
    assert "an exception ended this rank before it had joined: ending the job" in finished.output
    assert "goes on" not in finished.output


def test_an_exception_in_a_job_of_one_rank_is_left_to_python(tmp_path):
    (tmp_path / "before.py").write_text(BEFORE)
    finished = run_ranks(1, [str(tmp_path / "before.py")], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.timed_out) == (1, False), finished.output
    assert "ending the job" not in finished.output


CAUGHT = """
import sys
import mpirpc as rpc
from mpi4py import MPI
def run_tests():
    try:
        raise ValueError("a test failed")
    except ValueError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
run_tests() if MPI.COMM_WORLD.rank else None
MPI.COMM_WORLD.Dup().Barrier()
"""


def test_an_exception_that_was_caught_ends_nothing(tmp_path):
    """As a test runner does it, for debuggers."""
    (tmp_path / "caught.py").write_text(CAUGHT)
    finished = run_ranks(2, [str(tmp_path / "caught.py")], timeout=LIMIT, env=ENV)
    assert (finished.rc, finished.output) == (0, ""), finished.output


INTERRUPTED = """
import os, signal, sys, threading
import mpirpc as rpc
from mpi4py import MPI
def strike():
    frames = sys._current_frames()
    if any(f.f_code.co_name == "_wait_for_all" for f in stack(frames[threading.main_thread().ident])):
        os.kill(os.getpid(), signal.SIGINT)
    else:
        threading.Timer(0.01, strike).start()
def stack(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
if MPI.COMM_WORLD.rank == 0:
    strike()
    rpc.init_rpc()
else:
    MPI.COMM_WORLD.Recv(bytearray(1))
"""


def test_ctrl_c_inside_init_rpc_is_heard_and_ends_the_job(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    finished = run_ranks(2, [str(tmp_path / "interrupted.py")], timeout=LIMIT, env=ENV)
    assert not finished.timed_out, finished.output
    assert finished.rc != 0
    assert "KeyboardInterrupt" in finished.output
    assert "an exception ended this rank before it had joined: ending the job" in finished.output
