"""How ``doctor`` finds out: the facts of this rank, and those of all.

Rules for this file: nothing here may raise for a strange machine; what cannot be found out is told as
unknown. Ranks gather before RPC runs, by buffers on a communicator of their own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import mpirpc
from mpirpc.cli.doctor_checks import THREAD_LEVELS, Facts
from mpirpc.launch import library_name

SHOWN_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_",
    "PMI_",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PRTE_MCA_",
    "PRTE_LAUNCHED",
    "MPI_LOCAL",
    "MPIR_CVAR_",
    "MPICH_",
    "I_MPI_",
    "UCX_",
    "FI_",
    "SLURM_JOB_ID",
    "SLURM_MPI_TYPE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_",
    "TORCHELASTIC_RUN_ID",
    "MASTER_",
    "OMP_",
    "MPIRPC_",
)
SHOWN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
"""Variables that say how the job was started and set up; no other is shown: it may be secret."""

NOISE = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir")


def gather_facts() -> tuple[int, list[Facts]]:
    """Return this rank, and the facts of all ranks in rank order. Collective."""
    comm = MPI.COMM_WORLD.Dup()
    mine = json.dumps(asdict(_own_facts())).encode()
    counts = np.zeros(comm.size, dtype=np.int32)
    comm.Allgather(np.array([len(mine)], dtype=np.int32), counts)
    everything = bytearray(int(counts.sum()))
    comm.Allgatherv([mine, MPI.BYTE], [everything, counts, MPI.BYTE])
    rank = comm.rank
    comm.Free()
    ends = np.cumsum(counts)
    texts = [
        bytes(everything[int(end) - int(count) : int(end)]) for count, end in zip(counts, ends, strict=True)
    ]
    return rank, [_load(text) for text in texts]


def _load(text: bytes) -> Facts:
    fields = json.loads(text)
    return Facts(**{**fields, "cores": tuple(fields["cores"])})


def agree(status: int) -> int:
    """Return rank 0's ``status``. Collective."""
    shared = np.array([status], dtype=np.int32)
    MPI.COMM_WORLD.Bcast(shared, 0)
    return int(shared[0])


def _own_facts() -> Facts:
    levels = [getattr(MPI, f"THREAD_{name}") for name in THREAD_LEVELS]
    aware, how = _cuda()
    return Facts(
        rank=MPI.COMM_WORLD.rank,
        size=MPI.COMM_WORLD.size,
        host=MPI.Get_processor_name(),
        environ={
            name: value
            for name, value in sorted(os.environ.items())
            if (name.startswith(SHOWN_PREFIXES) or name in SHOWN_NAMES) and name not in NOISE
        },
        library=library_name(MPI.Get_library_version()),
        standard=".".join(map(str, MPI.Get_version())),
        thread_level=levels.index(MPI.Query_thread()),
        tag_limit=_tag_limit(),
        one_sided=_one_sided(),
        cuda_aware=aware,
        cuda_how=how,
        ulfm=_ulfm(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 0,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        core_size=_limit(resource.RLIMIT_CORE),
        shm_nbytes=_free_nbytes("/dev/shm"),
        ptrace_scope=_number_in("/proc/sys/kernel/yama/ptrace_scope"),
        cma=_cma(),
        container=_container(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi4py": _version("mpi4py"),
            "numpy": np.__version__,
            "mpirpc": mpirpc.__version__,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _free_nbytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _number_in(file: str) -> int:
    try:
        return int(Path(file).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


# --- MPI ---


def _tag_limit() -> int:
    found = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return found if isinstance(found, int) else 0


def _one_sided() -> str:
    """Try a window of this rank's own: the smallest proof that the library has one-sided operations."""
    with _quiet():  # Open MPI's UCX part complains of itself and is then not used
        try:
            window = MPI.Win.Allocate(8, 1, comm=MPI.COMM_SELF)
            try:
                window.Lock(0)
                window.Put(np.array([7], dtype=np.int64), 0)
                window.Flush(0)
                window.Unlock(0)
            finally:
                window.Free()
        except (MPI.Exception, NotImplementedError) as error:
            return f"fails: {error}"
    return "works (a window of one rank)"


@contextmanager
def _quiet() -> Iterator[None]:
    """Throw away what libraries write to standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _cuda() -> tuple[str, str]:
    """Ask the library whether it takes pointers to GPU memory."""
    library = _loaded_library()
    if library is None:
        return "unknown", "the MPI library was not found in this process"
    ask = getattr(library, "MPIX_Query_cuda_support", None)
    if ask is not None:
        return ("yes" if ask() else "no"), "MPIX_Query_cuda_support()"
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return "yes", "MPICH_GPU_SUPPORT_ENABLED=1"
    return "unknown", "the library has no MPIX_Query_cuda_support"


def _loaded_library() -> ctypes.CDLL | None:
    """Find the MPI library among what this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = {line.split()[-1] for line in lines if "/libmpi" in line and ".so" in line}
        names = sorted(
            path for path in paths if Path(path).name.startswith(("libmpi.so", "libmpich.so", "libmpi_"))
        )
        return ctypes.CDLL(names[0]) if names else None
    except OSError:
        return None


def _ulfm() -> str:
    """Say whether the library can go on after the death of a rank, and whether it was started so."""
    try:
        group = MPI.COMM_SELF.Get_failed()
        group.Free()
    except (MPI.Exception, NotImplementedError, AttributeError):
        return "not available"
    if "MPICH" in MPI.Get_library_version():
        return "calls available, but mpirun ends the job with its first dead rank"
    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true")
    return "available and enabled" if enabled else "available, not enabled (mpirun --with-ft ulfm)"


# --- the machine ---


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _cma() -> str:
    """Try to read a neighbour's memory, as MPI libraries do; nothing if there is no neighbour."""
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    processes = np.zeros(local.size, dtype=np.int64)
    local.Allgather(np.array([os.getpid()], dtype=np.int64), processes)
    found = _try_to_read(int(processes[(local.rank + 1) % local.size])) if local.size > 1 else ""
    local.Barrier()  # the neighbour must be there until it was asked
    local.Free()
    return found


def _try_to_read(pid: int) -> str:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        target = ctypes.create_string_buffer(8)
        here, there = _Piece(ctypes.addressof(target), 8), _Piece(8, 8)
        libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        number = ctypes.get_errno()
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    # nobody has anything at address 8: a system that lets us ask answers that this is a bad address
    return "works" if number == errno.EFAULT else os.strerror(number)


def _container() -> str:
    """Say in what kind of container this runs; nothing outside of one."""
    for file, name in (
        ("/.dockerenv", "Docker"),
        ("/run/.containerenv", "Podman"),
        ("/.singularity.d", "Apptainer"),
    ):
        if os.path.exists(file):
            return name
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else ""
