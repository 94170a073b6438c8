"""Unit tests for what mpirpc._core.pickling does with TorchScript functions and modules."""

import warnings

import pytest
import torch

import mpirpc as rpc
from mpirpc.errors import NotAFutureError, SerializationError
from mpirpc.testing import LoopbackCluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script warns that it is old

    @torch.jit.script
    def double(tensor):
        return tensor + tensor

    @torch.jit.script
    def refuse(tensor):
        if tensor.numel() >= 0:
            raise ValueError("refused")
        return tensor

    @rpc.functions.async_execution
    @torch.jit.script
    def no_future(tensor):
        return tensor


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, tensor):
        return tensor * self.factor


def scripted_scale(factor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Scale(factor))


def call(function, *args):
    return function(*args)


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


def test_scripted_function_is_called_by_name(cluster):
    assert rpc.rpc_sync("worker1", double, args=(torch.ones(2),)).tolist() == [2, 2]
    assert rpc.remote("worker1", double, args=(torch.ones(1),)).to_here().item() == 2


def test_scripted_function_as_argument_and_result(cluster):
    assert rpc.rpc_sync("worker1", call, args=(double, torch.ones(1))).item() == 2
    assert rpc.rpc_sync("worker1", dict, args=([("it", double)],))["it"] is double


def test_async_execution_over_a_scripted_function(cluster):
    with pytest.raises(NotAFutureError, match=r"test_pickling_scripts\.no_future returned Tensor"):
        rpc.rpc_sync("worker1", no_future, args=(torch.ones(1),))


def test_error_of_a_scripted_function(cluster):
    with pytest.raises(torch.jit.Error, match="refused"):
        rpc.rpc_sync("worker1", refuse, args=(torch.ones(1),))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_module_travels_with_its_code(cluster):
    module = rpc.rpc_sync("worker1", scripted_scale, args=(3.0,))
    assert isinstance(module, torch.jit.ScriptModule)
    assert module(torch.ones(1)).item() == 3
    assert rpc.rpc_sync("worker1", call, args=(module, torch.ones(1))).item() == 3


def test_method_of_a_scripted_module_is_refused(cluster):
    with pytest.raises(SerializationError, match="pickle"):
        rpc.rpc_async("worker1", scripted_scale(1.0).forward, args=(torch.ones(1),))
