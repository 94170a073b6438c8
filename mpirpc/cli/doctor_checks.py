"""What ``doctor`` makes of the facts: findings, each fault with its mend.

Rules for this file: pure. A check takes the facts of all ranks, in rank order, and yields findings; a new
check is a function and its entry in :data:`CHECKS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpirpc.launch import Launcher, find_wrong_start, read_launcher

OK = "ok"
NOTE = "note"
WARNING = "warning"
FAULT = "FAULT"
LEVELS = (OK, NOTE, WARNING, FAULT)
"""From harmless to fatal: with a fault a job would not work, with a warning it would be slow or brittle."""

THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
SERIALIZED = 2

MIN_TAG = 32767
"""The least that the MPI standard promises."""

MIN_SHM_NBYTES = 64 << 20
MIN_FILES = 1024
MIN_TORCH = (2, 9)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank knows of itself. Sizes in bytes; -1 is unlimited or unknown."""

    rank: int = 0
    size: int = 1
    host: str = "here"
    environ: dict[str, str] = field(default_factory=dict)
    library: str = "MPI"
    standard: str = "4.1"
    thread_level: int = 3
    tag_limit: int = MIN_TAG
    one_sided: str = "works"
    cuda_aware: str = "no"
    cuda_how: str = ""
    ulfm: str = "no"
    cores: tuple[int, ...] = (0, 1)
    host_cores: int = 2
    memlock: int = -1
    open_files: int = 65536
    core_size: int = 0
    shm_nbytes: int = 1 << 33
    ptrace_scope: int = 0
    cma: str = "works"
    container: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def launcher(self) -> Launcher:
        """Who started this rank."""
        return read_launcher(self.environ)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: how bad, about what, what was found, and how to mend it."""

    level: str
    subject: str
    text: str
    mend: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"level": self.level, "subject": self.subject, "text": self.text, "mend": self.mend}


Everyone = Sequence[Facts]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: ``0-3, 7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _by_value(everyone: Everyone, value: Callable[[Facts], Any]) -> str:
    """One value that all ranks share, or each value with its ranks."""
    found: dict[str, list[int]] = {}
    for facts in everyone:
        found.setdefault(str(value(facts)), []).append(facts.rank)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} (rank {ranks_text(ranks)})" for text, ranks in found.items())


# --- start ---


def check_start(everyone: Everyone) -> Iterator[Finding]:
    """Who started the job, and whether MPI knows of it."""
    names = _by_value(everyone, lambda facts: facts.launcher.name)
    wrong = {find_wrong_start(facts.environ, facts.rank, facts.size, facts.library) for facts in everyone} - {
        ""
    }
    for problem in sorted(wrong):
        text, _, mend = problem.rpartition("; ")
        yield Finding(FAULT, "launcher", text, mend)
    if not wrong:
        yield Finding(OK, "launcher", f"{names}; MPI sees {everyone[0].size} rank(s)")
    if everyone[0].size == 1 and not wrong:
        tasks = int(everyone[0].environ.get("SLURM_NTASKS", "1"))
        text = "one rank only: nothing between ranks was looked at"
        if tasks > 1:
            text = f"one rank, in a Slurm job of {tasks} tasks"
        yield Finding(NOTE, "ranks", text, "start it as your program: mpirun -n 4 python -m mpirpc doctor")
    yield from _check_variables(everyone)


def _check_variables(everyone: Everyone) -> Iterator[Finding]:
    """RANK and WORLD_SIZE that differ from MPI's mislead torch.distributed, not mpirpc."""
    wrong = [
        facts.rank
        for facts in everyone
        for name, value in (("RANK", facts.rank), ("WORLD_SIZE", facts.size))
        if facts.size > 1 and facts.environ.get(name, str(value)) != str(value)
    ]
    if wrong:
        yield Finding(
            WARNING,
            "launcher",
            f"RANK or WORLD_SIZE differs from MPI's on rank {ranks_text(sorted(set(wrong)))}",
            "start the program with python -m mpirpc run, which sets them, or unset them",
        )


def check_hosts(everyone: Everyone) -> Iterator[Finding]:
    """How many ranks each host has, and whether they have cores enough."""
    per_host = Counter(facts.host for facts in everyone)
    text = ", ".join(f"{host}: {count}" for host, count in per_host.items())
    yield Finding(OK, "hosts", f"{len(per_host)} host(s), ranks a host: {text}")
    for host, count in per_host.items():
        ranks = [facts for facts in everyone if facts.host == host]
        usable = {core for facts in ranks for core in facts.cores}
        cores = _by_value(ranks, lambda facts: len(facts.cores))
        if count > len(usable):
            yield Finding(
                WARNING,
                "cores",
                f"{host} is oversubscribed: {count} ranks on {len(usable)} usable cores",
                "start fewer ranks a host; if it must be, export OMPI_MCA_mpi_yield_when_idle=1 (Open MPI)",
            )
        elif any(len(facts.cores) == 1 for facts in ranks):
            yield Finding(
                WARNING,
                "cores",
                f"{host}: a rank is bound to one core, where progress thread and computing take turns",
                "give each rank two cores or more: --bind-to none, --map-by slot:PE=2 (Open MPI), "
                "--cpus-per-task=2 (srun)",
            )
        else:
            yield Finding(OK, "cores", f"{host}: {cores} usable by a rank, {ranks[0].host_cores} in all")


# --- MPI ---


def check_library(everyone: Everyone) -> Iterator[Finding]:
    """Which MPI, the same on all ranks."""
    libraries = {(facts.library, facts.standard) for facts in everyone}
    text = _by_value(everyone, lambda facts: f"{facts.library} (MPI {facts.standard})")
    if len(libraries) == 1:
        yield Finding(OK, "MPI", text)
    else:
        yield Finding(
            WARNING,
            "MPI",
            f"ranks use different libraries: {text}",
            "use one environment on all hosts; check PATH and LD_LIBRARY_PATH there",
        )
    if any(int(facts.standard.partition(".")[0]) < 4 for facts in everyone):
        text = "messages over 2 GiB are cut into pieces (the library is older than MPI-4)"
        yield Finding(OK, "large counts", text)
    else:
        yield Finding(OK, "large counts", "yes (MPI-4)")


def check_threads(everyone: Everyone) -> Iterator[Finding]:
    """Mpirpc needs one thread at a time; a program that calls MPI too needs any."""
    least = min(facts.thread_level for facts in everyone)
    name = f"MPI_THREAD_{THREAD_LEVELS[least]}"
    if least < SERIALIZED:
        yield Finding(
            FAULT,
            "threads",
            f"MPI grants {name}, mpirpc needs MPI_THREAD_SERIALIZED",
            "remove mpi4py.rc.thread_level and mpi4py.rc.threads settings, or use an MPI built with threads",
        )
    elif least == SERIALIZED:
        text = f"{name}: enough for mpirpc; the program itself must not call MPI while RPC runs"
        yield Finding(NOTE, "threads", text, "for both, an MPI library that grants MPI_THREAD_MULTIPLE")
    else:
        yield Finding(OK, "threads", name)


def check_features(everyone: Everyone) -> Iterator[Finding]:
    """What the library can do beside plain messages; mpirpc runs without any of it."""
    tags = min(facts.tag_limit for facts in everyone)
    yield Finding(
        OK if tags >= MIN_TAG else FAULT,
        "tag limit",
        str(tags),
        "" if tags >= MIN_TAG else "ask who built it",
    )
    for subject, value in (
        ("one-sided", lambda facts: facts.one_sided),
        ("CUDA-aware", lambda facts: f"{facts.cuda_aware}: {facts.cuda_how}"),
        ("ULFM", lambda facts: facts.ulfm),
    ):
        yield Finding(OK, subject, _by_value(everyone, value))


# --- the machine ---


def check_limits(everyone: Everyone) -> Iterator[Finding]:
    """Limits of the system that MPI and torch run into."""
    memlock = min((facts.memlock for facts in everyone if facts.memlock >= 0), default=-1)
    text = f"locked memory {size_text(memlock)}, open files {_by_value(everyone, lambda f: f.open_files)}"
    text += f", core dumps {_by_value(everyone, lambda f: size_text(f.core_size))}"
    yield Finding(OK, "limits", text)
    if 0 <= memlock < MIN_SHM_NBYTES:
        yield Finding(
            NOTE,
            "limits",
            f"only {size_text(memlock)} can be locked: too little for InfiniBand and other RDMA networks",
            "ulimit -l unlimited on the hosts (limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        )
    few = [facts.rank for facts in everyone if 0 <= facts.open_files < MIN_FILES]
    if few:
        least = min(everyone[rank].open_files for rank in few)
        text = f"only {least} open files are allowed on rank {ranks_text(few)}"
        yield Finding(WARNING, "limits", text, f"ulimit -n {MIN_FILES} or more")


def check_shared_memory(everyone: Everyone) -> Iterator[Finding]:
    """How ranks of one host reach each other."""
    per_host = Counter(facts.host for facts in everyone)
    least = min(everyone, key=lambda facts: facts.shm_nbytes if facts.shm_nbytes >= 0 else 1 << 62)
    if least.shm_nbytes >= 0 and least.shm_nbytes < MIN_SHM_NBYTES * per_host[least.host]:
        yield Finding(
            WARNING,
            "/dev/shm",
            f"{size_text(least.shm_nbytes)} free on {least.host} for {per_host[least.host]} rank(s): "
            "MPI may fail to start, or end with a bus error",
            "docker run --shm-size=2g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
        )
    else:
        yield Finding(OK, "/dev/shm", f"{size_text(least.shm_nbytes)} free")
    refused = [facts for facts in everyone if per_host[facts.host] > 1 and facts.cma not in ("works", "")]
    if refused:
        yield Finding(
            NOTE,
            "CMA",
            f"single copies between processes are refused ({refused[0].cma}; ptrace_scope "
            f"{refused[0].ptrace_scope}): messages within a host are copied twice, or MPI warns",
            "docker run --cap-add=SYS_PTRACE; sysctl kernel.yama.ptrace_scope=0; or, against Open MPI's "
            "warning, export OMPI_MCA_smsc=^cma",
        )
    containers = sorted({facts.container for facts in everyone if facts.container})
    if containers:
        yield Finding(OK, "container", f"runs in {', '.join(containers)}")


def check_versions(everyone: Everyone) -> Iterator[Finding]:
    """The packages, the same on all ranks."""
    packages = sorted({name for facts in everyone for name in facts.versions})
    differing = [name for name in packages if len({facts.versions.get(name) for facts in everyone}) > 1]
    text = ", ".join(f"{name} {everyone[0].versions.get(name)}" for name in packages)
    yield Finding(OK, "versions", text)
    for name in differing:
        yield Finding(
            FAULT if name in ("mpirpc", "torch", "python") else WARNING,
            "versions",
            f"{name} differs: {_by_value(everyone, lambda facts: facts.versions.get(name))}",  # noqa: B023
            "use the same environment on all hosts",
        )
    old = [facts.rank for facts in everyone if _version(facts.versions.get("torch", "")) < MIN_TORCH]
    if everyone[0].versions.get("torch") and old:
        yield Finding(FAULT, "versions", "torch is older than 2.9", "pip install 'torch>=2.9'")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdecimal())


def size_text(nbytes: int) -> str:
    """Bytes for people."""
    if nbytes < 0:
        return "unlimited"
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return str(nbytes)


CHECKS: tuple[Callable[[Everyone], Iterator[Finding]], ...] = (
    check_versions,
    check_library,
    check_start,
    check_threads,
    check_hosts,
    check_features,
    check_limits,
    check_shared_memory,
)


def find_all(everyone: Everyone) -> list[Finding]:
    """Run every check."""
    return [finding for check in CHECKS for finding in check(everyone)]
