"""Unit tests for mpirpc.cli.terminal."""

import os
import pty
import subprocess
import sys

ASK = "from mpirpc.cli.terminal import terminal; import sys; sys.stderr.write(repr(terminal() is not None))"


def answer_with_a_terminal_of_its_own(launcher_output):
    """Ask in a process whose output is a terminal, started by one whose output is ``launcher_output``."""
    master, slave = pty.openpty()
    launcher = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {ASK!r}], stdout={slave}, stderr=2, check=True)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", launcher],
            stdout=launcher_output,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            pass_fds=[slave],
        )
    finally:
        os.close(master)
        os.close(slave)
    return done.stderr


def test_a_terminal_made_by_a_launcher_that_writes_to_a_file_is_none(tmp_path):
    """Open MPI's mpirun gives ranks a pseudo terminal although its own output is a log file."""
    with open(tmp_path / "log", "w") as log:
        assert answer_with_a_terminal_of_its_own(log) == "False"


def test_a_terminal_behind_the_launcher_is_found():
    master, slave = pty.openpty()
    try:
        assert answer_with_a_terminal_of_its_own(slave) == "True"
    finally:
        os.close(master)
        os.close(slave)
