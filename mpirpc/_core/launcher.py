"""What the launcher's environment variables say, and which ways to start a job are wrong.

MPI alone decides rank and size; these variables only explain why MPI sees a smaller job than was started.

Rules for this file: pure, the environment is handed in. Which variables a rank sees was looked up by
running each launcher, see ``docs/running-on-slurm.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HOW_TO_START = "mpirun -n {size} python -m mpirpc run script.py"

SRUN_REMEDY = "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), or mpirun inside the allocation"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who started this process, by its environment.

    Attributes:
        name: For people, such as ``mpirun (Open MPI)``; ``none`` if nobody is known.
        size: How many ranks it says it started; 0 if it does not say.
        rank: Which of them this one is; -1 if it does not say.
        by_mpi: Whether it is one that tells MPI about the ranks.
    """

    name: str
    size: int = 0
    rank: int = -1
    by_mpi: bool = False


def read_launcher(environ: Mapping[str, str]) -> Launcher:
    """Find out who started this process. The innermost launcher counts: torchrun under mpirun is torchrun."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return Launcher("torchrun", _number(environ, "WORLD_SIZE", 0), _number(environ, "RANK", -1))
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _mpi_launcher(environ, "mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if "PMI_SIZE" in environ and "MPI_LOCALRANKID" in environ:
        return _mpi_launcher(environ, "mpirun (hydra: MPICH or Intel MPI)", "PMI_SIZE", "PMI_RANK")
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return _srun(environ)
    if "PMI_SIZE" in environ:
        return _mpi_launcher(environ, "a PMI launcher", "PMI_SIZE", "PMI_RANK")
    if "PMIX_RANK" in environ:
        return Launcher("a PMIx launcher", 0, _number(environ, "PMIX_RANK", -1), True)
    return Launcher("none")


def _mpi_launcher(environ: Mapping[str, str], name: str, size: str, rank: str) -> Launcher:
    return Launcher(name, _number(environ, size, 0), _number(environ, rank, -1), True)


def _srun(environ: Mapping[str, str]) -> Launcher:
    by_mpi = "PMI_SIZE" in environ or "PMIX_RANK" in environ
    kind = environ.get("SLURM_MPI_TYPE", "pmi2" if "PMI_SIZE" in environ else "pmix")
    return Launcher(
        f"srun --mpi={kind}" if by_mpi else "srun without --mpi",
        _number(environ, "SLURM_STEP_NUM_TASKS", 0),
        _number(environ, "SLURM_PROCID", -1),
        by_mpi,
    )


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else otherwise


def library_name(text: str) -> str:
    """Shorten what ``MPI_Get_library_version`` says to name and version."""
    line = text.strip("\0 \n").partition("\n")[0].partition(",")[0]
    return " ".join(line.replace("Version:", "").split())


def find_wrong_start(environ: Mapping[str, str], rank: int, size: int, library: str) -> str:
    """Say in what way the job was started wrongly, and the remedy; nothing if it was not.

    Args:
        environ: This process's environment.
        rank: In MPI's world.
        size: Of MPI's world.
        library: Name of the MPI library that mpi4py has loaded.
    """
    launcher = read_launcher(environ)
    if launcher.name == "torchrun":
        return _find_wrong_torchrun(launcher, rank, size)
    if size == 1 and launcher.size > 1:
        sees = f"{launcher.name} started {launcher.size} ranks, but MPI ({library}) sees 1"
        if "srun" in launcher.name:
            return f"{sees}: they are {launcher.size} separate jobs; {SRUN_REMEDY}"
        return (
            f"{sees}: mpi4py has loaded another MPI library than that of the launcher; start with the mpirun "
            "that belongs to it, as python -m mpirpc doctor shows it, and install one MPI only"
        )
    declared = _number(environ, "WORLD_SIZE", 1)
    if size == 1 and declared > 1 and not launcher.by_mpi:
        return (
            f"WORLD_SIZE={declared} is set, but MPI sees 1 rank: MPI did not start this job; "
            f"start it with: {HOW_TO_START.format(size=declared)}"
        )
    return ""


def _find_wrong_torchrun(launcher: Launcher, rank: int, size: int) -> str:
    if (launcher.size, launcher.rank) == (size, rank):
        return ""
    how = HOW_TO_START.format(size=max(launcher.size, 2))
    return (
        f"torchrun says this is rank {launcher.rank} of {launcher.size}, but MPI says {rank} of {size}: "
        f"torchrun tells MPI nothing; start it without torchrun: {how}"
    )


def find_wrong_belief(environ: Mapping[str, str], name: str, given: int, size: int, fact: int) -> str:
    """Say that a program's ``rank=`` or ``world_size=`` differs from MPI's, and the remedy.

    Args:
        environ: This process's environment.
        name: ``rank`` or ``world_size``.
        given: What the program believes.
        size: How many ranks the group has.
        fact: What MPI says instead of ``given``.
    """
    text = f"{name}={given} was given, but MPI says {fact}"
    wanted = given if name == "world_size" else given + 1
    if wanted <= size:
        return f"{text}; leave it out, or give what MPI says"
    if size == 1 and not read_launcher(environ).by_mpi:
        how = "it runs without a launcher; start it with"
    else:
        how = "start more ranks"
    return f"{text}; {how}: {HOW_TO_START.format(size=wanted)}"
