"""Names to transports: which kinds of group ``init_rpc`` can start.

A third party may register a transport of its own; what it has to build is a ``Runtime``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mpirpc._core.agent import WorkerInfo
from mpirpc._core.mpi_group import join_group
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport_mpi import MPITransport
from mpirpc.errors import ConfigurationError
from mpirpc.options import MPIRpcBackendOptions, RpcBackendOptions

__all__ = [
    "BackendType",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

Construct = Callable[..., RpcBackendOptions]
"""Makes a backend's options from ``rpc_timeout``, ``init_method`` and further keywords."""

Init = Callable[..., Runtime]
"""Called as ``init(name, rank, world_size, options)`` on every worker; starts and returns the runtime."""


class _Backends(type):
    """Makes ``BackendType.MPI`` and ``BackendType["MPI"]`` find what is registered, at any time."""

    _registered: ClassVar[dict[str, BackendType]] = {}

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return _Backends._registered[name]
        except KeyError:
            raise AttributeError(
                f"no RPC backend {name!r}; there are {sorted(_Backends._registered)}"
            ) from None

    def __getitem__(cls, name: str) -> BackendType:
        return _Backends._registered[name]

    def __iter__(cls) -> Any:
        return iter(_Backends._registered.values())

    def __len__(cls) -> int:
        return len(_Backends._registered)


@dataclass(frozen=True, eq=False)
class BackendType(metaclass=_Backends):
    """A kind of group: ``BackendType.MPI``, or one that was registered.

    Attributes:
        name: As registered.
        construct_options: Makes its options.
        init: Starts a worker.
    """

    name: str
    construct_options: Construct
    init: Init

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def register_backend(name: str, construct_options: Construct, init: Init) -> BackendType:
    """Add a kind of group under ``name``.

    Args:
        name: An upper-case name that is not taken.
        construct_options: Called as ``construct_options(rpc_timeout=..., init_method=..., **kwargs)``.
        init: Called as ``init(name=, rank=, world_size=, options=)``; returns a started ``Runtime``.

    Raises:
        ConfigurationError: The name is taken.
    """
    if backend_registered(name):
        raise ConfigurationError(f"an RPC backend {name!r} is registered already")
    backend = BackendType(name, construct_options, init)
    _Backends._registered[name] = backend
    return backend


def backend_registered(name: str) -> bool:
    """Say whether there is a kind of group of this name."""
    return name in _Backends._registered


def construct_rpc_backend_options(
    backend: BackendType, rpc_timeout: float = 60.0, init_method: str = "mpi://", **kwargs: Any
) -> RpcBackendOptions:
    """Make the options of ``backend``."""
    return backend.construct_options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(
    backend: BackendType, name: str | None, rank: int, world_size: int | None, options: Any
) -> Runtime:
    """Start this worker in a group of kind ``backend``."""
    return backend.init(name=name, rank=rank, world_size=world_size, options=options)


def _init_mpi(name: str | None, rank: int, world_size: int | None, options: RpcBackendOptions) -> Runtime:
    problem = ""
    if not isinstance(options, MPIRpcBackendOptions):
        problem = f"rpc_backend_options is a {type(options).__qualname__}, not MPIRpcBackendOptions"
    mapped = getattr(options, "device_maps", ())
    comm, names = join_group(getattr(options, "comm", None), name, rank, world_size, problem, mapped)
    assert isinstance(options, MPIRpcBackendOptions)
    workers = [WorkerInfo(worker, place) for place, worker in enumerate(names)]
    return Runtime(MPITransport(comm, options.chunk_nbytes), workers, options)


register_backend("MPI", MPIRpcBackendOptions, _init_mpi)
