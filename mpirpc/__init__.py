"""The PyTorch distributed RPC framework on MPI: start with ``mpirun``, ``import mpirpc as rpc``, go on."""

from mpirpc import autograd, backend_registry, errors, functions, nn, optim, profiler
from mpirpc._core.agent import WorkerInfo
from mpirpc._core.future import Future
from mpirpc.api import (
    all_gather,
    barrier,
    broadcast,
    debug_info,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    wait,
    wait_all,
)
from mpirpc.backend_registry import BackendType
from mpirpc.errors import RemoteError, RpcError, RpcTimeoutError
from mpirpc.launch import on_terminate, run_main
from mpirpc.options import MPIRpcBackendOptions, RpcBackendOptions
from mpirpc.rref import RRef

__version__ = "0.1.0"

__all__ = [
    "BackendType",
    "Future",
    "MPIRpcBackendOptions",
    "RRef",
    "RemoteError",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "WorkerInfo",
    "all_gather",
    "autograd",
    "backend_registry",
    "barrier",
    "broadcast",
    "debug_info",
    "errors",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "nn",
    "on_terminate",
    "optim",
    "profiler",
    "remote",
    "rpc_async",
    "rpc_sync",
    "run_main",
    "shutdown",
    "wait",
    "wait_all",
]
