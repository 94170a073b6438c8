"""Unit tests for mpirpc.dropin: options, names, spawn; tests/test_dropin.py runs whole programs."""

import os
import subprocess
import sys

import pytest
import torch

import mpirpc
from mpirpc import dropin
from mpirpc.dropin import TensorPipeRpcBackendOptions
from mpirpc.errors import ConfigurationError
from tests._ranks.launch import ROOT


def test_options_are_those_of_mpirpc_with_torchs_defaults():
    options = TensorPipeRpcBackendOptions()
    assert isinstance(options, mpirpc.MPIRpcBackendOptions)
    assert (options.num_worker_threads, options.rpc_timeout) == (16, 60.0)


def test_options_keep_what_means_something():
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=3,
        rpc_timeout=5,
        init_method="tcp://localhost:1",
        device_maps={"w1": {"cuda:0": "cuda:1"}},
        devices=["cuda:0"],
        _transports=["uv"],
        _channels=["basic"],
    )
    assert (options.num_worker_threads, options.rpc_timeout) == (3, 5.0)
    assert options.device_maps == {"w1": {torch.device("cuda:0"): torch.device("cuda:1")}}
    assert options.devices == [torch.device("cuda:0")]


def test_spawn_runs_the_share_of_this_rank():
    seen = []
    assert dropin._spawn(lambda *args: seen.append(args), args=("a", 2), nprocs=1) is None
    ended = dropin._spawn(lambda *args: seen.append(args), nprocs=1, join=False)
    assert ended.join() is True
    assert ended.pids() == [os.getpid()]
    assert seen == [(0, "a", 2), (0,)]


def test_spawn_of_another_number_is_refused():
    with pytest.raises(ConfigurationError, match=r"(?s)starts 3 processes.*has 1 ranks.*mpirun -n 3 python"):
        dropin._spawn(print, nprocs=3)


def test_spawn_lets_errors_out():
    with pytest.raises(KeyError):
        dropin._spawn(lambda rank: {}[rank])


def test_given_master_is_kept(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert dropin._find_master("here", 4) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(("num_hosts", "address"), [(1, "127.0.0.1"), (2, "here")])
def test_master_is_a_free_port_on_the_first_host(num_hosts, address, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")  # half of a pair counts for nothing
    found, port = dropin._find_master("here", num_hosts)
    assert found == address
    assert 1024 <= int(port) <= 65535


NAMES = """
from mpirpc import dropin
dropin.install()
dropin.install()
import mpirpc, torch
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api as api
from torch.distributed.rpc import *
from torch.distributed import autograd, rpc as same
from torch.distributed.autograd import context
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import RemoteModule as same_module
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.optim.optimizer import DistributedOptimizer as same_optimizer
assert rpc is same is torch.distributed.rpc and api is rpc.api
assert rpc_sync is mpirpc.rpc_sync and RRef is mpirpc.RRef is rpc.PyRRef and init_rpc is mpirpc.init_rpc
assert context is mpirpc.autograd.context and autograd.is_available()
assert RemoteModule is same_module is mpirpc.nn.RemoteModule
assert DistributedOptimizer is same_optimizer is mpirpc.optim.DistributedOptimizer
assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
assert rpc.functions.async_execution is mpirpc.functions.async_execution
try:
    rpc.api._nobody_uses_this
except AttributeError as error:
    print(error)
"""


def test_every_form_of_import_finds_mpirpc():
    """In a process of its own: what is replaced stays so."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NAMES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "torch.distributed.rpc.api._nobody_uses_this is not provided by mpirpc" in finished.stdout
