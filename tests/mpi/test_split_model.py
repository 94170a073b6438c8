"""mpirpc.split_model over real ranks: a model split over workers has the state of the plain model.

Rank 0 holds the model; its remote parts live on worker1 and on the last worker (the same one at two ranks).
"""

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.nn import RemoteModule, full_parameters, full_state_dict, load_full_state_dict
from mpirpc.optim import DistributedOptimizer

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def filled(seed, module):
    """Give a module parameters that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return module


def body(seed):
    """Layers with parameters, buffers and versions (BatchNorm)."""
    return filled(seed, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))


class Model(nn.Module):
    """Two bodies with something of its own before, between and after; plain, or split over ``workers``."""

    def __init__(self, seed, workers=None, make=body):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5 + seed, dtype=torch.float64))
        self.first = self.part(workers, 0, make, seed + 20)
        self.middle = nn.Sequential(filled(seed, nn.Linear(3, 3)), self.part(workers, 1, make, seed + 30))
        self.register_buffer("steps", torch.full((1,), float(seed)))
        self.head = filled(seed + 40, nn.Linear(3, 2))

    @staticmethod
    def part(workers, number, make, seed):
        return make(seed) if workers is None else RemoteModule(workers[number], make, (seed,))

    def forward(self, x):
        return self.head(self.middle(self.first(x * self.scale)))


def split_model(world, seed, make=body):
    return Model(seed, workers=[1, world.size - 1], make=make)


def assert_same(state, expected):
    assert list(state) == list(expected)
    torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)


@pytest.mark.mpi(min_size=2)
def test_state_is_that_of_the_plain_model(rpc_world):
    """Keys, their order, values, and the versions that torch keeps beside them."""
    if rpc_world.rank == 0:
        state, expected = full_state_dict(split_model(rpc_world, 1)), Model(1).state_dict()
        assert_same(state, expected)
        assert type(state) is OrderedDict
        assert dict(state._metadata) == dict(expected._metadata)


@pytest.mark.mpi(min_size=2)
def test_state_goes_through_a_file_from_split_to_plain_and_back(rpc_world):
    if rpc_world.rank == 0:
        file = io.BytesIO()
        torch.save(full_state_dict(split_model(rpc_world, 1)), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        plain = Model(2)
        assert plain.load_state_dict(state).missing_keys == []
        assert_same(plain.state_dict(), Model(1).state_dict())
        split = split_model(rpc_world, 3)
        assert load_full_state_dict(split, plain.state_dict()) == ([], [])
        assert_same(full_state_dict(split), Model(1).state_dict())
        assert torch.equal(split(X).detach(), Model(1)(X).detach())


@pytest.mark.mpi(min_size=2)
def test_loading_keeps_parameters_and_so_their_optimizers(rpc_world):
    if rpc_world.rank == 0:
        split, plain = split_model(rpc_world, 1), Model(2)
        optimizer = DistributedOptimizer(torch.optim.Adam, full_parameters(split), lr=0.1)
        load_full_state_dict(split, plain.state_dict())
        local = torch.optim.Adam(plain.parameters(), lr=0.1)
        for _ in range(3):
            with autograd.context() as context_id:
                loss = split(X).square().sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            local.zero_grad()
            plain(X).square().sum().backward()
            local.step()
        assert_same(full_state_dict(split), plain.state_dict())
        state = optimizer.state_dict()
        del state["mpirpc"]
        torch.testing.assert_close(state, local.state_dict(), rtol=0, atol=0)


@pytest.mark.mpi(min_size=2)
def test_parameters_come_in_the_order_of_the_plain_model(rpc_world):
    if rpc_world.rank == 0:
        values = [rref.to_here().detach() for rref in full_parameters(split_model(rpc_world, 1))]
        expected = [parameter.detach() for parameter in Model(1).parameters()]
        assert len(values) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.mpi(min_size=2)
def test_parameter_that_two_local_modules_share_comes_once(rpc_world):
    if rpc_world.rank == 0:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), RemoteModule(1, nn.Linear, (3, 3)))
        model[1].weight = model[0].weight
        assert len(full_parameters(model)) == 3 + 2


@pytest.mark.mpi(min_size=2)
def test_model_without_remote_parts_and_a_remote_module_alone(rpc_world):
    if rpc_world.rank == 0:
        assert_same(full_state_dict(Model(1)), Model(1).state_dict())
        plain = Model(2)
        load_full_state_dict(plain, Model(1).state_dict())
        assert_same(plain.state_dict(), Model(1).state_dict())
        remote = RemoteModule(1, body, (1,))
        assert_same(remote.remote_state_dict(), body(1).state_dict())
        assert remote.load_remote_state_dict(body(2).state_dict()) == ([], [])
        assert_same(remote.remote_state_dict(), body(2).state_dict())
        assert_same(full_state_dict(remote), body(2).state_dict())
        assert len(full_parameters(remote)) == 4


@pytest.mark.mpi(min_size=2)
def test_state_fetched_is_a_copy(rpc_world):
    if rpc_world.rank == 0:
        for rank in range(2):  # also of a module of this worker
            remote = RemoteModule(rank, body, (1,))
            for value in remote.remote_state_dict().values():
                value.fill_(7)
            assert_same(remote.remote_state_dict(), body(1).state_dict())


@pytest.mark.mpi(min_size=2)
def test_remote_parts_of_remote_parts(rpc_world):
    """A split model on worker1, one of whose parts is back on worker0, held by a handle here."""
    if rpc_world.rank == 0:
        rref = rpc.remote(1, Model, args=(1,), kwargs={"workers": [0, rpc_world.size - 1]})
        outer = nn.Sequential(body(3), RemoteModule.init_from_module_rref(1, rref))
        plain = nn.Sequential(body(3), Model(1))
        assert_same(full_state_dict(outer), plain.state_dict())
        assert len(full_parameters(outer)) == len(list(plain.parameters()))
        other = nn.Sequential(body(4), Model(2))
        load_full_state_dict(outer, other.state_dict())
        assert_same(full_state_dict(outer), other.state_dict())
        assert torch.equal(outer(X).detach(), other(X).detach())


class Counter(nn.Module):
    """Keeps state that is no tensor, and a list of tensors."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def get_extra_state(self):
        return {"count": self.count, "tensors": [torch.full((2,), float(self.count))]}

    def set_extra_state(self, state):
        self.count = state["count"] + int(state["tensors"][0][0]) - state["count"]


@pytest.mark.mpi(min_size=2)
def test_extra_state_travels(rpc_world):
    if rpc_world.rank == 0:
        model = nn.Sequential(nn.Linear(1, 1), RemoteModule(1, Counter, (5,)))
        state = full_state_dict(model)
        assert list(state) == ["0.weight", "0.bias", "1._extra_state"]
        assert state["1._extra_state"]["count"] == 5
        other = nn.Sequential(nn.Linear(1, 1), RemoteModule(1, Counter, (9,)))
        load_full_state_dict(other, state)
        assert full_state_dict(other)["1._extra_state"]["tensors"][0].tolist() == [5.0, 5.0]


# --- what does not fit ---


@pytest.mark.mpi(min_size=2)
def test_state_that_does_not_fit_is_refused_whole_and_changes_nothing(rpc_world):
    if rpc_world.rank == 0:
        split, state = split_model(rpc_world, 1), Model(2).state_dict()
        state["middle.1.9.weight"] = state.pop("middle.1.0.weight")
        state["bias"] = state.pop("steps")
        state["first.0.bias"] = torch.zeros(7)
        state["head.weight"] = torch.zeros(1, 3)
        with pytest.raises(RuntimeError) as caught:
            load_full_state_dict(split, state)
        assert str(caught.value).splitlines() == [
            "Error(s) in loading state_dict for Model:",
            '\tUnexpected key(s) in state_dict: "middle.1.9.weight", "bias".',
            '\tMissing key(s) in state_dict: "steps", "middle.1.0.weight".',
            "\tsize mismatch for first.0.bias: the state has (7,), the model has (3,).",
            "\tsize mismatch for head.weight: the state has (1, 3), the model has (2, 3).",
        ]
        assert_same(full_state_dict(split), Model(1).state_dict())


@pytest.mark.mpi(min_size=2)
def test_load_that_is_not_strict_takes_what_there_is(rpc_world):
    if rpc_world.rank == 0:
        split, state = split_model(rpc_world, 1), Model(2).state_dict()
        del state["first.0.bias"], state["scale"]
        state["first.more"] = torch.zeros(1)
        loaded = load_full_state_dict(split, state, strict=False)
        assert loaded.missing_keys == ["scale", "first.0.bias"]
        assert loaded.unexpected_keys == ["first.more"]
        expected = Model(2).state_dict()
        expected["first.0.bias"] = Model(1).state_dict()["first.0.bias"]
        expected["scale"] = Model(1).state_dict()["scale"]
        assert_same(full_state_dict(split), expected)


@pytest.mark.mpi(min_size=2)
def test_failure_of_one_owner_is_raised_after_all_have_answered(rpc_world):
    if rpc_world.rank == 0:
        model = nn.Sequential(RemoteModule(1, no_state), RemoteModule(rpc_world.size - 1, body, (1,)))
        with pytest.raises(ArithmeticError, match="no state today"):
            full_state_dict(model)
        assert_same(model[1].remote_state_dict(), body(1).state_dict())


def no_state():
    module = nn.Linear(1, 1)
    module.register_state_dict_pre_hook(fail)
    return module


def fail(*_):
    raise ArithmeticError("no state today")


@pytest.mark.mpi(min_size=2)
def test_state_dict_of_a_split_model_itself_is_refused(rpc_world):
    """No RPC is made by a method that makes none elsewhere."""
    if rpc_world.rank == 0:
        with pytest.raises(ValueError, match="or ``full_state_dict`` for a whole model"):
            split_model(rpc_world, 1).state_dict()
