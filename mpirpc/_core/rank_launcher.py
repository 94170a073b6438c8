"""Start a program on n ranks from a process that is not one of them, and come back in any case.

Facts that shaped this file (Open MPI 5.0, MPICH 5.0): a rank that inherits an outer launcher's variables
joins the outer job, or tries to; SIGINT can hang MPICH's launcher while SIGTERM ends both with their ranks.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpirpc.errors import ConfigurationError

OUTER_JOB = ("PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "OMPI_MCA_orte", "OMPI_MCA_ess")
"""Prefixes of the variables through which a launcher talks to its ranks."""

OMPI_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_")
"""Prefixes of the variables through which a person talks to Open MPI; other OMPI_ ones are the launcher's."""

GRACE = 10.0
"""Seconds that a launcher may take to end its ranks after SIGTERM."""


class Finished(NamedTuple):
    """How a job ended: the launcher's exit status, what all ranks wrote, whether it had to be ended."""

    status: int
    output: str
    timed_out: bool


def run_on_ranks(
    num_ranks: int,
    argv: Sequence[str],
    timeout: float,
    changes: Mapping[str, str],
    cwd: str,
    launcher: Sequence[str] = (),
) -> Finished:
    """Run ``python *argv`` on ranks of a job of its own; wait for its end, ``timeout`` seconds at most.

    Args:
        num_ranks: How many.
        argv: What follows ``python``.
        timeout: In seconds; then the job is ended.
        changes: To the environment.
        cwd: Where the ranks start.
        launcher: Its words up to ``-n``; by default mpirun with what small machines need.

    Raises:
        ConfigurationError: There is no launcher.
    """
    words = list(launcher) or default_launcher()
    process = subprocess.Popen(
        [*words, "-n", str(num_ranks), sys.executable, *argv],
        env={**_clean_environment(os.environ), **changes},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, timed_out = process.communicate(timeout=timeout)[0], False
    except subprocess.TimeoutExpired:
        output, timed_out = _end(process), True
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    text = output.replace(b"\0", b"").decode(errors="replace")
    return Finished(process.returncode, text, timed_out)


@functools.cache
def default_launcher() -> list[str]:
    """Return the mpirun beside this Python, or the first in PATH, with its options.

    Raises:
        ConfigurationError: There is none.
    """
    found = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if found is None:
        raise ConfigurationError(
            "there is no mpirun beside this Python or in PATH",
            "load an MPI module, or install the extra openmpi or mpich",
        )
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    is_open_mpi = "Open MPI" in shown or "OpenRTE" in shown
    return [found, "--oversubscribe", "--bind-to", "none"] if is_open_mpi else [found]


def _clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any outer MPI job, in which ranks that share cores give way."""
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith(OUTER_JOB) and (not name.startswith("OMPI_") or name.startswith(OMPI_SETTINGS))
    }
    env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def _end(process: subprocess.Popen[bytes]) -> bytes:
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=GRACE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
