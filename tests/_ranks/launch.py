"""Start a program on n MPI ranks from a process that is not one of them.

Facts that shaped this file (Open MPI 5.0, MPICH 5.0): Open MPI takes 1 s less to start when it does not look
for fabrics (``btl=^ofi``); SIGINT can hang MPICH's launcher while SIGTERM ends both with their ranks; a rank
that inherits an outer launcher's variables joins the outer job, or tries to.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
"""The top of the checkout: where the ranks start, so that they import this mpirpc."""

OUTER_JOB = ("PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "OMPI_MCA_orte", "OMPI_MCA_ess")
"""Prefixes of the variables through which a launcher talks to its ranks."""

OMPI_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_")
"""Prefixes of the variables through which a person talks to Open MPI; other OMPI_ ones are the launcher's."""

NOT_STARTED = "PMIx server's listener thread failed to start"
"""Open MPI's launcher says so when it starts no rank: seen once in some thousand starts on a busy machine."""

GRACE = 10.0
"""Seconds that a launcher may take to end its ranks after SIGTERM."""


class Finished(NamedTuple):
    """How a job on several ranks ended."""

    rc: int
    """Exit status of the launcher; nonzero when it had to be ended."""
    output: str
    """Standard output and error of all ranks, as they came."""
    timed_out: bool = False


def run_ranks(
    n: int, argv: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Finished:
    """Run ``python *argv`` on ``n`` ranks and wait for its end, at most ``timeout`` seconds."""
    return run_job([*mpirun_command(n), sys.executable, *argv], timeout, rank_environment(env or {}), cwd)


def run_job(command: Sequence[str], timeout: float, env: Mapping[str, str], cwd: Path = ROOT) -> Finished:
    """Run a launcher as it is given and wait for its end, at most ``timeout`` seconds.

    One that did not start is started once more.
    """
    finished = _run_once(command, timeout, env, cwd)
    return _run_once(command, timeout, env, cwd) if NOT_STARTED in finished.output else finished


def _run_once(command: Sequence[str], timeout: float, env: Mapping[str, str], cwd: Path) -> Finished:
    process = subprocess.Popen(
        command,
        env=env,
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
    except BaseException:
        _end(process)
        raise
    text = output.replace(b"\0", b"").decode(errors="replace")
    if timed_out:
        text += f"\nended after {timeout:g} s without a result"
    return Finished(process.returncode or (1 if timed_out else 0), text, timed_out)


def mpirun_command(n: int) -> list[str]:
    """The launcher and its options for ``n`` ranks on this host, however few cores it has."""
    command = [mpirun(), "-n", str(n)]
    return [*command, "--oversubscribe", "--bind-to", "none"] if is_open_mpi() else command


@functools.cache
def mpirun() -> str:
    """The launcher beside this Python, else the first one in PATH."""
    found = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError("no mpirun beside this Python or in PATH: install the extra openmpi or mpich")
    return found


@functools.cache
def mpirun_version() -> str:
    """One line that names the launcher, such as ``mpirun (Open MPI) 5.0.11``."""
    shown = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=False).stdout
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    if "HYDRA" in shown:
        version = next((line.split()[-1] for line in lines if line.startswith("Version")), "?")
        return f"mpirun (MPICH hydra) {version}"
    return lines[0] if lines else "mpirun (unknown)"


def is_open_mpi() -> bool:
    """Whether the launcher is Open MPI's."""
    return "Open MPI" in mpirun_version() or "OpenRTE" in mpirun_version()


def rank_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any outer MPI job, with what small shared machines need."""
    env = {name: value for name, value in os.environ.items() if not _is_outer_job(name)}
    env.setdefault("OMP_NUM_THREADS", "1")
    if is_open_mpi():
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        env.setdefault("OMPI_MCA_btl", "^ofi")
        env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    env.update(changes)
    return env


def _is_outer_job(name: str) -> bool:
    return name.startswith(OUTER_JOB) or (name.startswith("OMPI_") and not name.startswith(OMPI_SETTINGS))


def _end(process: subprocess.Popen[bytes]) -> bytes:
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=GRACE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
