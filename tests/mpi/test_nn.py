"""mpirpc.nn over real ranks: a RemoteModule computes, learns and travels as the module itself would.

Rank 0 calls; the module lives on worker1.
"""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import RRefError, UnknownWorkerError
from mpirpc.nn import RemoteModule
from mpirpc.optim import DistributedOptimizer


class Net(nn.Module):
    """A module with parameters of its own and of a part, options and several inputs."""

    def __init__(self, scale, bias=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.bias = bias
        self.part = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.part.parameters():
                parameter.uniform_(-1, 1, generator=generator)

    def forward(self, x, shift=0.0):
        return self.scale * self.part(x) + self.bias + shift


class NoModule:
    def __init__(self, scale):
        pass


def make_net(scale):
    return Net(scale)


def make_nothing():
    return "nothing"


def fail_to_make():
    raise ArithmeticError("no net today")


X = torch.arange(6.0).reshape(2, 3)


def remote_net():
    """A handle to a Net on worker1. No fixture: pytest would keep the handle until after the leak check."""
    return RemoteModule("worker1/cpu", Net, args=(2,), kwargs={"bias": 1.0})


# --- calls ---


@pytest.mark.mpi(min_size=2)
def test_forward_computes_what_the_module_computes(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        expected = Net(2, bias=1.0)(X, shift=3.0).detach()
        for result in (net(X, shift=3.0), net.forward(X, 3.0), net.forward_async(X, shift=3.0).wait()):
            assert torch.equal(result.detach(), expected)


@pytest.mark.mpi(min_size=2)
def test_forms_of_remote_device(rpc_world):
    if rpc_world.rank == 0:
        info = rpc.get_worker_info("worker1")
        for device in ("worker1/cpu", "worker1", "rank:1/cpu", "rank:1", "1/cpu", "1", 1, info):
            net = RemoteModule(device, Net, (2,))
            assert (net.on, net.device) == ("worker1", "cpu")
            assert net.module_rref.owner_name() == "worker1"
            assert repr(net) == "RemoteModule(on='worker1', device='cpu')"
            assert torch.equal(net(X).detach(), Net(2)(X).detach())


@pytest.mark.mpi(min_size=2)
def test_device_alone_means_this_worker(rpc_world):
    if rpc_world.rank == 0:
        net = RemoteModule("cpu", Net, (2,))
        assert net.on == "worker0"
        assert torch.equal(net(X).detach(), Net(2)(X).detach())


@pytest.mark.mpi(min_size=2)
def test_module_cls_may_be_a_function(rpc_world):
    if rpc_world.rank == 0:
        assert torch.equal(RemoteModule("worker1", make_net, (2,))(X).detach(), Net(2)(X).detach())


@pytest.mark.mpi(min_size=2)
def test_result_on_another_device_comes_back_to_the_cpu(rpc_world):
    """The device named meta has shapes and no values: enough to see where tensors go."""
    if rpc_world.rank == 0:
        net = RemoteModule("worker1/meta", Shapes)
        assert net.forward([X], {"y": X}) == ("meta", "meta")


class Shapes(nn.Module):
    def forward(self, xs, ys):
        return xs[0].device.type, ys["y"].device.type


# --- learning ---


@pytest.mark.mpi(min_size=2)
def test_training_is_that_of_one_process(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        optimizer = DistributedOptimizer(torch.optim.SGD, net.remote_parameters(), lr=0.05, momentum=0.9)
        local = Net(2, bias=1.0)
        local_optimizer = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
        for _ in range(5):
            with autograd.context() as context_id:
                loss = net(X).square().sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            local_optimizer.zero_grad()
            local_loss = local(X).square().sum()
            local_loss.backward()
            local_optimizer.step()
            torch.testing.assert_close(loss, local_loss)


@pytest.mark.mpi(min_size=2)
def test_remote_parameters_are_the_modules(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        expected = [parameter.detach() for parameter in Net(2).parameters()]
        all_of_them = [rref.to_here().detach() for rref in net.remote_parameters()]
        assert all(torch.equal(a, b) for a, b in zip(all_of_them, expected, strict=True))
        own = net.remote_parameters(recurse=False)
        assert [rref.to_here().item() for rref in own] == [2.0]
        assert {rref.owner_name() for rref in own} == {"worker1"}


@pytest.mark.mpi(min_size=2)
def test_remote_parameters_of_many_modules_are_asked_at_once(rpc_world):
    """pytorch#43906, pytorch#54645: a wish for ``remote_parameters`` that does not wait."""
    if rpc_world.rank == 0:
        nets = [RemoteModule(rank, Net, (2,)) for rank in range(rpc_world.size)]
        asked = [net.remote_parameters_async() for net in nets]
        own = [net.remote_parameters_async(recurse=False) for net in nets]
        assert [len(future.wait()) for future in asked] == [3] * rpc_world.size
        owners = [rref.owner().id for future in own for rref in future.wait()]
        assert owners == list(range(rpc_world.size))


@pytest.mark.mpi(min_size=2)
def test_train_and_eval_set_the_module_at_its_owner(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        assert net.eval() is net
        assert not net.training
        assert not rpc.rpc_sync(1, is_training, args=(net.get_module_rref(),))
        assert net.train() is net
        assert net.training
        assert rpc.rpc_sync(1, is_training, args=(net.get_module_rref(),))
        hybrid = nn.Sequential(nn.Linear(3, 3), net)
        hybrid.eval()
        assert not rpc.rpc_sync(1, is_training, args=(net.get_module_rref(),))
        assert "RemoteModule(on='worker1'" in repr(hybrid)


def is_training(rref):
    return rref.local_value().training


# --- handles ---


@pytest.mark.mpi(min_size=2)
def test_handle_sent_by_rpc_stands_for_the_same_module(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        expected = net(X).detach()
        for rank in range(rpc_world.size):
            assert torch.equal(rpc.rpc_sync(rank, call_it, args=(net, X)).detach(), expected)
        rpc.rpc_sync(rpc_world.size - 1, double_it, args=(net,))
        assert not torch.equal(net(X).detach(), expected)
        back = rpc.rpc_sync(1, give_back, args=(net,))
        assert torch.equal(back(X).detach(), net(X).detach())
        assert isinstance(back, nn.Module)


def call_it(net, x):
    return net(x)


def double_it(net):
    rpc.rpc_sync(net.on, double_scale, args=(net.get_module_rref(),))


def double_scale(rref):
    rref.local_value().scale.data.mul_(2)


def give_back(net):
    return net


@pytest.mark.mpi(min_size=2)
def test_handle_from_an_rref(rpc_world):
    """pytorch#59242, pytorch#59292, pytorch#48983: a handle from an RRef, and the RRef out of a handle."""
    if rpc_world.rank == 0:
        net = remote_net()
        rref = net.get_module_rref()
        assert rref is net.module_rref
        other = RemoteModule.init_from_module_rref("worker1/cpu", rref)
        assert torch.equal(other(X).detach(), net(X).detach())
        last = rpc_world.size - 1
        made_there = rpc.rpc_sync(last, RemoteModule.init_from_module_rref, args=(last, rref))
        assert made_there.on == "worker1"
        assert torch.equal(made_there(X).detach(), net(X).detach())
        assert len(made_there.remote_parameters()) == 3


@pytest.mark.mpi(min_size=2)
def test_pickling_outside_of_a_call_is_refused(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        for save in (pickle.dumps, copy.deepcopy, lambda net: torch.save(net, io.BytesIO())):
            with pytest.raises(RRefError, match="RemoteModule can only be pickled when using RPC") as caught:
                save(net)
            assert "full_state_dict(model)" in caught.value.hint


# --- refusals ---


@pytest.mark.mpi(min_size=2)
def test_methods_of_nn_module_are_kept_or_refused_with_an_alternative(rpc_world):
    """pytorch#40550, pytorch#43895: methods that make no sense through a handle did something wrong."""
    if rpc_world.rank == 0:
        net = remote_net()
        kept = {"forward", "train", "eval"}
        names = {name for name, _ in inspect.getmembers(nn.Module, inspect.isfunction) if name[0] != "_"}
        assert len(names) > 40
        for name in names - kept:
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule. [PGUT]"):
                getattr(net, name)(1, 2, x=3)


@pytest.mark.mpi(min_size=2)
def test_refusals_name_what_helps(rpc_world):
    if rpc_world.rank == 0:
        net = remote_net()
        with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
            net.parameters()
        with pytest.raises(ValueError, match="Please use ``remote_state_dict`` instead"):
            net.state_dict()
        with pytest.raises(ValueError, match="Please use ``load_remote_state_dict`` instead"):
            net.load_state_dict({})
        with pytest.raises(ValueError, match=r"``module_rref.rpc_sync\(\).double\(\.\.\.\)``"):
            net.double()
        with pytest.raises(ValueError, match="Please name the device in ``remote_device`` instead"):
            net.to("cpu")


@pytest.mark.mpi(min_size=2)
def test_something_that_makes_no_module(rpc_world):
    if rpc_world.rank == 0:
        expected = r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>"
        with pytest.raises(ValueError, match=expected):
            RemoteModule("worker1", NoModule, (1,))
        made = RemoteModule("worker1", make_nothing)
        with pytest.raises(ValueError, match=expected):
            made.forward()


@pytest.mark.mpi(min_size=2)
def test_error_of_the_constructor_is_raised_by_the_first_use(rpc_world):
    if rpc_world.rank == 0:
        net = RemoteModule("worker1", fail_to_make)
        with pytest.raises(ArithmeticError, match="no net today"):
            net(X)
        with pytest.raises(ArithmeticError, match="no net today"):
            net.remote_parameters()


@pytest.mark.mpi(min_size=2)
def test_remote_device_that_names_nothing(rpc_world):
    if rpc_world.rank == 0:
        for device in ("", "/", "/cpu", "worker1/", "worker1/nowhere", "worker1/cpu/cpu"):
            with pytest.raises(ValueError, match=f"could not parse remote_device '{device}'"):
                RemoteModule(device, Net, (2,))
        for device in ("nobody", "nobody/cpu", "rank:99/cpu", "99", 99, -1):
            with pytest.raises(UnknownWorkerError):
                RemoteModule(device, Net, (2,))


@pytest.mark.mpi(min_size=2)
def test_arguments_of_the_wrong_type(rpc_world):
    if rpc_world.rank == 0:
        with pytest.raises(TypeError, match="remote_device must be a str like 'worker1/cpu', not bool"):
            RemoteModule(True, Net, (2,))
        with pytest.raises(TypeError, match="remote_device must be a str like 'worker1/cpu', not device"):
            RemoteModule(torch.device("cpu"), Net, (2,))
        with pytest.raises(
            TypeError, match=r"module_cls must be a subclass of nn\.Module or a function, not 'Net'"
        ):
            RemoteModule("worker1", "Net")
        with pytest.raises(TypeError, match="args must be a tuple or a list of arguments, not int"):
            RemoteModule("worker1", Net, 2)
        with pytest.raises(TypeError, match="kwargs must be a dict of keyword arguments, not tuple"):
            RemoteModule("worker1", Net, (2,), (3,))
        with pytest.raises(TypeError, match=r"module_rref must be an RRef to an nn\.Module, not Linear"):
            RemoteModule.init_from_module_rref("worker1", nn.Linear(1, 1))
