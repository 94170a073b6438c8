"""Put mpirpc in the place of ``torch.distributed.rpc``, for programs that are not to be changed.

``python -m mpirpc run`` calls :func:`export_environment` and :func:`install` before the program starts.
Afterwards these import mpirpc's names, in whatever form the import is written::

    torch.distributed.rpc  (.api .backend_registry .constants .functions .options)
    torch.distributed.autograd
    torch.distributed.optim.DistributedOptimizer     the other optimizers stay torch's
    torch.distributed.nn.RemoteModule                the other names stay torch's
    torch.multiprocessing.spawn, start_processes     run a rank's share in the rank

Rules for this file: torch's modules are replaced by name and never looked into. A private name of torch
stands here only if published programs use it.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import mpirpc
from mpirpc import autograd, backend_registry, functions
from mpirpc._core.current import get_current, get_current_or_none
from mpirpc._core.job import get_job
from mpirpc.errors import ConfigurationError
from mpirpc.options import DEFAULT_RPC_TIMEOUT, MPIRpcBackendOptions
from mpirpc.rref import UNSET_TIMEOUT

__all__ = ["TensorPipeRpcBackendOptions", "export_environment", "install"]

RPC = "torch.distributed.rpc"

_F = TypeVar("_F", bound=Callable[..., Any])


# --- the environment ---


def export_environment() -> None:
    """Set the variables by which ``torch.distributed`` finds the other ranks, from what MPI says.

    They are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``. The last two name rank 0's host and a port that is free there, or stay as rank 0 has
    them if it has both.

    Call it on every rank.   Progress: blocks until all have.
    """
    job = get_job()
    address, port = job.share("\n".join(_find_master(job.host, job.num_hosts))).split("\n")
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.size),
        LOCAL_RANK=str(job.local_rank),
        LOCAL_WORLD_SIZE=str(job.local_size),
        MASTER_ADDR=address,
        MASTER_PORT=port,
    )


def _find_master(host: str, num_hosts: int) -> tuple[str, str]:
    """Choose where a process group's ranks meet."""
    given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if given[0] and given[1]:
        return given[0], given[1]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    return "127.0.0.1" if num_hosts == 1 else host, port


# --- torch.distributed.rpc ---


class TensorPipeRpcBackendOptions(MPIRpcBackendOptions):
    """``MPIRpcBackendOptions`` as torch programs make them; what is only about TensorPipe is ignored.

    Args:
        num_worker_threads: As in ``MPIRpcBackendOptions``.
        rpc_timeout: As in ``MPIRpcBackendOptions``.
        init_method: Ignored: the ranks have met by MPI.
        device_maps: As in ``MPIRpcBackendOptions``.
        devices: As in ``MPIRpcBackendOptions``.
        _transports: Ignored.
        _channels: Ignored.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = "env://",
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Any = None,
        _channels: Any = None,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
        )


class _Agent:
    """The current agent, as far as published programs ask it."""

    def get_worker_infos(self) -> list[mpirpc.WorkerInfo]:
        return mpirpc.get_worker_infos()

    def get_worker_info(self, name: Any = None) -> mpirpc.WorkerInfo:
        return mpirpc.get_worker_info(name)


def _get_current_rpc_agent() -> _Agent:
    get_current()
    return _Agent()


def _is_current_rpc_agent_set() -> bool:
    return get_current_or_none() is not None


def _require_initialized(func: _F) -> _F:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        get_current()
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _get_rpc_timeout() -> float:
    timeout: float = get_current().options.rpc_timeout
    return timeout


def _set_rpc_timeout(timeout: float) -> None:
    get_current().options.rpc_timeout = float(timeout)


def _all_gather(obj: Any, worker_names: Any = None, timeout: float = UNSET_TIMEOUT) -> dict[str, Any]:
    return mpirpc.all_gather(obj, worker_names, timeout)


def _barrier(worker_names: Any = None) -> None:
    mpirpc.barrier(worker_names)


_CALLS: dict[str, Any] = {
    "RRef": mpirpc.RRef,
    "get_worker_info": mpirpc.get_worker_info,
    "remote": mpirpc.remote,
    "rpc_async": mpirpc.rpc_async,
    "rpc_sync": mpirpc.rpc_sync,
    "shutdown": mpirpc.shutdown,
    "_get_current_rpc_agent": _get_current_rpc_agent,
    "_is_current_rpc_agent_set": _is_current_rpc_agent_set,
    "_set_rpc_timeout": _set_rpc_timeout,
    "get_rpc_timeout": _get_rpc_timeout,
}
"""Names that ``torch.distributed.rpc`` and its module ``api`` both have."""

_API: dict[str, Any] = {
    **_CALLS,
    "WorkerInfo": mpirpc.WorkerInfo,
    "PyRRef": mpirpc.RRef,
    "_all_gather": _all_gather,
    "_barrier": _barrier,
    "_require_initialized": _require_initialized,
    "_wait_all": mpirpc.wait_all,
}

_OPTIONS: dict[str, Any] = {
    "RpcBackendOptions": mpirpc.RpcBackendOptions,
    "TensorPipeRpcBackendOptions": TensorPipeRpcBackendOptions,
}

_CONSTANTS: dict[str, Any] = {
    "DEFAULT_RPC_TIMEOUT_SEC": DEFAULT_RPC_TIMEOUT,
    "DEFAULT_INIT_METHOD": "env://",
    "DEFAULT_NUM_WORKER_THREADS": 16,
    "DEFAULT_SHUTDOWN_TIMEOUT": 0,
    "UNSET_RPC_TIMEOUT": UNSET_TIMEOUT,
}

_PUBLIC = [
    "BackendType",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
"""What ``from torch.distributed.rpc import *`` gives."""


class _StandIn(ModuleType):
    """A module under a torch name with names of mpirpc."""

    def __init__(self, name: str, names: Mapping[str, Any], public: Sequence[str] | None = None) -> None:
        super().__init__(name, f"Stands in for torch's {name}: its names lead to mpirpc.")
        self.__dict__.update(names)
        self.__all__ = sorted(public or (key for key in names if not key.startswith("_")))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__name__}.{name} is not provided by mpirpc, which stands in for torch here"
        )


def install() -> None:
    """Put mpirpc in torch's place, in this process, for all imports from now on. Twice is as good as once.

    Names that were imported before keep their meaning: call it before the program's modules are imported.
    """
    if isinstance(sys.modules.get(RPC), _StandIn):
        return
    if not backend_registry.backend_registered("TENSORPIPE"):
        backend_registry.register_backend(
            "TENSORPIPE", TensorPipeRpcBackendOptions, backend_registry.BackendType["MPI"].init
        )
    parts = {
        "api": _StandIn(f"{RPC}.api", _API),
        "backend_registry": _StandIn(
            f"{RPC}.backend_registry",
            {name: getattr(backend_registry, name) for name in backend_registry.__all__},
        ),
        "constants": _StandIn(f"{RPC}.constants", _CONSTANTS),
        "functions": _StandIn(f"{RPC}.functions", {"async_execution": functions.async_execution}),
        "options": _StandIn(f"{RPC}.options", _OPTIONS),
    }
    rpc = {
        **_API,
        **_OPTIONS,
        "BackendType": mpirpc.BackendType,
        "init_rpc": mpirpc.init_rpc,
        "is_available": mpirpc.is_available,
        **parts,
    }
    _put(RPC, _StandIn(RPC, rpc, _PUBLIC))
    for part in parts.values():
        _put(part.__name__, part)
    gradients = {name: getattr(autograd, name) for name in autograd.__all__}
    _put(
        "torch.distributed.autograd",
        _StandIn("torch.distributed.autograd", {**gradients, "is_available": _yes}),
    )
    _put_into_package("torch.distributed.optim", "optimizer", "DistributedOptimizer", mpirpc.optim)
    _put_into_package("torch.distributed.nn.api", "remote_module", "RemoteModule", mpirpc.nn)
    nn = importlib.import_module("torch.distributed.nn")
    nn.RemoteModule = mpirpc.nn.RemoteModule  # type: ignore[attr-defined]
    _replace_spawn()


def _yes() -> bool:
    """Say that distributed autograd can be used."""
    return True


def _put(name: str, module: ModuleType) -> None:
    """Let ``import name`` and ``parent.leaf`` find the module."""
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(importlib.import_module(parent), leaf, module)


def _put_into_package(package: str, leaf: str, name: str, source: ModuleType) -> None:
    """Replace a module of a package of torch's whose other modules stay; some have been imported already."""
    value = getattr(source, name)
    stand_in = _StandIn(f"{package}.{leaf}", {name: value})
    sys.modules[stand_in.__name__] = stand_in  # first: the package imports it
    parent = importlib.import_module(package)
    setattr(parent, leaf, stand_in)
    if hasattr(parent, name):
        setattr(parent, name, value)


# --- torch.multiprocessing.spawn ---


class _Ended:
    """Stands for the processes of a ``spawn(join=False)``: they have ended when it returns."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Say that all have ended."""
        return True

    def pids(self) -> list[int]:
        """Return this rank's process."""
        return [os.getpid()]


def _replace_spawn() -> None:
    shortcuts = importlib.import_module("torch.multiprocessing")
    home = sys.modules["torch.multiprocessing.spawn"]  # as an attribute, the name is the function
    for module in (shortcuts, home):
        module.spawn = _spawn  # type: ignore[attr-defined]
        module.start_processes = _spawn  # type: ignore[attr-defined]


def _spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **_: Any,
) -> _Ended | None:
    """Run ``fn(rank, *args)`` in this rank: what ``torch.multiprocessing.spawn`` starts, mpirun has started.

    An exception of ``fn`` comes out as it is. With ``join=False`` too it returns when ``fn`` has ended here.

    Raises:
        ConfigurationError: ``nprocs`` is not the number of ranks.
    """
    job = get_job()
    if nprocs != job.size:
        raise ConfigurationError(
            f"the program starts {nprocs} processes by torch.multiprocessing.spawn, but this job has "
            f"{job.size} ranks, of which each runs one of them",
            f"start it with: mpirun -n {nprocs} python -m mpirpc run {' '.join(sys.argv)}",
        )
    fn(job.rank, *args)
    return None if join else _Ended()
