"""Unit tests for mpirpc.backend_registry: backends are found by name, also those of others."""

import pytest

from mpirpc import BackendType, MPIRpcBackendOptions, RpcBackendOptions
from mpirpc.backend_registry import (
    _Backends,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from mpirpc.errors import ConfigurationError


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(_Backends, "_registered", dict(_Backends._registered))


def make_options(rpc_timeout, init_method, **more):
    return rpc_timeout, init_method, more


def test_mpi_is_there():
    assert BackendType.MPI is BackendType["MPI"]
    assert backend_registered("MPI")
    assert repr(BackendType.MPI) == "BackendType.MPI"
    assert BackendType.MPI in list(BackendType)


def test_unknown_backends():
    assert not backend_registered("TENSORPIPE")
    with pytest.raises(AttributeError, match=r"no RPC backend 'TENSORPIPE'; there are \['MPI'\]"):
        getattr(BackendType, "TENSORPIPE")  # noqa: B009
    with pytest.raises(KeyError):
        BackendType["TENSORPIPE"]


def test_backends_of_others():
    mine = register_backend("MINE", make_options, lambda **given: given)
    assert BackendType.MINE is mine
    assert len(BackendType) == 2
    assert construct_rpc_backend_options(mine, 5, extra=1) == (5, "mpi://", {"extra": 1})
    given = init_backend(mine, "name", 0, 1, "options")
    assert given == {"name": "name", "rank": 0, "world_size": 1, "options": "options"}


def test_names_are_taken_once():
    with pytest.raises(ConfigurationError, match="'MPI' is registered already"):
        register_backend("MPI", make_options, lambda: None)


def test_options_of_mpi():
    options = construct_rpc_backend_options(BackendType.MPI, rpc_timeout=5, num_worker_threads=3)
    assert type(options) is MPIRpcBackendOptions
    assert (options.rpc_timeout, options.num_worker_threads) == (5.0, 3)


def test_mpi_wants_its_own_options():
    with pytest.raises(ConfigurationError, match="is a RpcBackendOptions, not MPIRpcBackendOptions"):
        init_backend(BackendType.MPI, "a", 0, 1, RpcBackendOptions())
