"""Puts mpirpc under torch's names, private ones included, and makes the suite's fixtures.

What a private name does is answered here in terms of mpirpc; torch's own is used where it is a plain helper
that makes no RPC. Rules for this file and `name_*.py`: nothing is better here than in mpirpc. A helper may
rename and reformat; if it would have to do what mpirpc does not do, the test must fail.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import mpirpc
from mpirpc._core.current import get_current, get_current_or_none, set_process_runtime
from mpirpc.errors import ConfigurationError, WorkerLostError
from mpirpc.options import DEFAULT_RPC_TIMEOUT
from tests.conformance import (
    facades,
    name_agent,
    name_autograd,
    name_faulty,
    name_rref,
    name_together,
    name_words,
)
from tests.conformance.facades import Facade
from tests.conformance.torch_suite import SUITE

TIMEOUT_TEXT = "RPC ran for more than"

LAUNCHERS = ("TENSORPIPE",)
"""Names of torch's backends that the tests of options ask for; here they mean MPI."""

PLAIN_HELPERS = (
    "PythonUDF",
    "RPCExecMode",
    "_InternalRPCPickler",
    "_build_rpc_profiling_key",
    "_internal_rpc_pickler",
    "_thread_local_tensor_tables",
    "serialize",
)
"""Names of ``torch.distributed.rpc.internal`` that make no RPC: torch's own."""

_facades: dict[str, Facade] = {}


def install() -> Callable[[bool], type]:
    """Put everything in place; return what makes fixtures. Before any module of the suite is imported."""
    internal = importlib.import_module("torch.distributed.rpc.internal")
    remote_module = importlib.import_module("torch.distributed.nn.api.remote_module")
    found = facades.make()
    _facades.update(found)
    found["torch.distributed.rpc.internal"].extras.update(
        {name: getattr(internal, name) for name in PLAIN_HELPERS}
    )
    found["torch.distributed.rpc.constants"].extras.update(
        DEFAULT_RPC_TIMEOUT_SEC=DEFAULT_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT=0
    )
    found["torch.distributed.nn.api.remote_module"].extras.update(
        _RemoteModule=remote_module._RemoteModule,
        _REMOTE_MODULE_PICKLED_ATTRIBUTES=remote_module._REMOTE_MODULE_PICKLED_ATTRIBUTES,
    )
    for part in (name_agent, name_rref, name_autograd, name_together, name_words):
        part.add(found)
    _add_start_and_end(found)
    _print_failed_calls()
    facades.install(found)
    # lets @torch.jit.script functions of the suite with an RRef[T] argument compile; calling one with a
    # Python RRef still fails, as it must
    for module in (torch._jit_internal, torch.jit.annotations):
        module.RRef = mpirpc.RRef  # type: ignore[attr-defined]
    return _fixture


def _print_failed_calls() -> None:
    """Let callees print what a call raised, as torch does; mpirpc logs it for those who ask."""
    logger = logging.getLogger("mpirpc.call")
    logger.addHandler(logging._StderrHandler(logging.DEBUG))  # type: ignore[attr-defined]
    logger.setLevel(logging.DEBUG)


# --- start and end ---


def _add_start_and_end(found: Mapping[str, Facade]) -> None:
    api = found["torch.distributed.rpc.api"]
    api.extras.update(
        _ignore_rref_leak=True,
        _delete_all_user_and_unforked_owner_rrefs=lambda: get_current().store.release_all_users(),
        _set_and_start_rpc_agent=set_process_runtime,
    )
    registry = found["torch.distributed.rpc.backend_registry"]
    registry.extras["register_backend"] = _register_backend
    rpc = found["torch.distributed.rpc"]
    rpc.extras.update(
        init_rpc=_init_rpc,
        shutdown=_shutdown,
        _init_rpc_backend=_init_rpc_backend,
        TensorPipeRpcBackendOptions=_Options,
    )
    api.extras["shutdown"] = _shutdown
    for name in LAUNCHERS:
        if not mpirpc.backend_registry.backend_registered(name):
            mpirpc.backend_registry.register_backend(name, _Options, mpirpc.BackendType["MPI"].init)


class _Options(mpirpc.MPIRpcBackendOptions):
    """``TensorPipeRpcBackendOptions`` as the suite calls it; refuses in pybind's words."""

    def __init__(self, *, _transports: Any = None, _channels: Any = None, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ConfigurationError as error:
            if isinstance(options.get("rpc_timeout", 0), (int, float)):
                raise
            raise TypeError(f"incompatible constructor arguments: {error}") from error


def _init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start RPC; on fewer ranks than the job has, on a communicator of these, as any MPI program would."""
    options = rpc_backend_options
    if world_size is not None and world_size < MPI.COMM_WORLD.size and options is not None:
        group = MPI.COMM_WORLD.group.Incl(range(world_size))
        options.comm = MPI.COMM_WORLD.Create_group(group)
    with (
        name_words.said(
            ConfigurationError, TypeError, _about_options(backend, options), "rpc_backend_options is a"
        ),
        name_words.said(
            ConfigurationError,
            TypeError,
            "Argument backend must be a member of BackendType",
            "must be a BackendType",
        ),
        name_words.said(ConfigurationError, RuntimeError, "the name is not unique", "is used by ranks"),
    ):
        mpirpc.init_rpc(name, backend, rank, world_size, options)


def _about_options(backend: Any, options: Any) -> str:
    """Return what torch says of options that are not its agent's."""
    if backend is None:
        return "Could not infer backend for options"
    if not isinstance(options, mpirpc.RpcBackendOptions):
        return "Argument rpc_backend_options must be an instance of RpcBackendOptions"
    return "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"


def _init_rpc_backend(*, store: Any, **arguments: Any) -> Any:
    options = arguments.pop("rpc_backend_options")
    with name_words.said(ConfigurationError, RuntimeError, "the name is not unique", "is used by ranks"):
        return mpirpc.backend_registry.init_backend(**arguments, options=options)


def _register_backend(name: str, construct_options: Any, init: Any) -> Any:
    """Register a backend whose ``init`` takes a store too and returns an agent, which torch then starts."""

    def start(name: str, rank: int, world_size: int, options: Any) -> Any:
        agent = init(None, name, rank, world_size, options)
        _facades["torch.distributed.rpc.api"]._set_and_start_rpc_agent(agent)

    words = f"RPC backend {name}: already registered"
    with name_words.said(ConfigurationError, RuntimeError, words, "is registered already"):
        return mpirpc.backend_registry.register_backend(name, construct_options, start)


def _shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End RPC. Steps that a test has replaced are called as torch's shutdown would; leaks as it has set."""
    api = _facades["torch.distributed.rpc.api"]
    runtime = get_current()
    ignore = bool(api._ignore_rref_leak)
    store = runtime.store
    if graceful:
        try:
            if api._wait_all_workers is not name_together.wait_all_workers:
                api._wait_all_workers(timeout)
            release = type(store).release_all_users
            store.release_all_users = _once(partial(release, store), api)
            runtime.shutdown = partial(runtime.shutdown, ignore_leaks=ignore)
        except BaseException:
            mpirpc.shutdown(graceful=False)
            raise
    with name_words.said(WorkerLostError, RuntimeError, "followers timed out in _all_gather", "left without"):
        mpirpc.shutdown(graceful, timeout)


def _once(release: Callable[[], None], api: Facade) -> Callable[[], None]:
    """Return what mpirpc's shutdown calls: a test's replacement of the step, which may call the original."""

    def step() -> None:
        get_current().store.release_all_users = release
        api._delete_all_user_and_unforked_owner_rrefs()

    return step


def is_running() -> bool:
    """Say whether RPC runs in this process."""
    return get_current_or_none() is not None


def shutdown_if_running() -> None:
    """End RPC after a failed test."""
    if is_running():
        mpirpc.shutdown()


def reset() -> None:
    """Put back what a test may have set in the private names."""
    name_agent.reset()


# --- fixtures ---


def _fixture(faulty: bool) -> type:
    if not faulty:
        base: Any = importlib.import_module(f"{SUITE}.rpc.rpc_agent_test_fixture").RpcAgentTestFixture
        return type("Plain", (_Texts, base), {"rpc_backend": _mpi, "rpc_backend_options": _plain_options})
    base = importlib.import_module(f"{SUITE}.rpc.faulty_rpc_agent_test_fixture").FaultyRpcAgentTestFixture
    name_faulty.add(_facades)
    return type("Faulty", (_Texts, base), {})


class _Texts:
    """What the tests expect in error messages."""

    def get_shutdown_error_regex(self) -> str:
        return ".*"

    def get_timeout_error_regex(self) -> str:
        return TIMEOUT_TEXT


@property  # type: ignore[misc]
def _mpi(_test: Any) -> Any:
    return mpirpc.BackendType["MPI"]


@property  # type: ignore[misc]
def _plain_options(test: Any) -> Any:
    return mpirpc.MPIRpcBackendOptions(init_method=test.init_method)
