"""mpirpc.local_optimizer and mpirpc.optim over real ranks: clipping, ``.grad``, the state in one dict.

Rank 0 calls; the parameters live on worker1 and on the last worker (the same one at two ranks).
"""

import io
import math

import pytest
import torch
from torch import nn, optim

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError, OptimizerError
from mpirpc.optim import DistributedOptimizer
from tests.mpi.optim_parts import (
    STEPS,
    Part,
    assert_equal,
    inputs,
    local_step,
    make_parts,
    remote_backward,
    remote_step,
)

# --- clipping ---


@pytest.mark.mpi(min_size=2)
def test_clipping_is_that_of_one_process(rpc_world):
    """Norm, clipped gradients and steps; a norm above and one below the limit."""
    if rpc_world.rank == 0:
        for norm_type in (2.0, 1.0, 3.5, math.inf):
            for max_norm in (1e-3, 1e6):
                parts, weights = make_parts(rpc_world)
                optimizer = DistributedOptimizer(optim.SGD, weights, lr=1.0)
                local_parts = [Part(1), Part(2)]
                local_weights = [part.weight for part in local_parts]
                local_parts[1].forward(local_parts[0].forward(inputs(0))).sum().backward()
                expected = nn.utils.clip_grad_norm_(local_weights, max_norm, norm_type)
                with autograd.context() as context_id:
                    remote_backward(context_id, parts, 0)
                    total = optimizer.clip_grad_norm(context_id, max_norm, norm_type)
                    clipped = [gradient_of(part, context_id) for part in parts]
                    optimizer.step(context_id)
                optim.SGD(local_weights, lr=1.0).step()
                assert torch.equal(total, expected)
                assert all(torch.equal(a, b.grad) for a, b in zip(clipped, local_weights, strict=True))
                assert_equal(weights, local_parts)


def gradient_of(part, context_id):
    return rpc.rpc_sync(part.owner(), gradient_here, args=(part, context_id))


def gradient_here(part, context_id):
    return autograd.get_gradients(context_id)[part.local_value().weight]


@pytest.mark.mpi(min_size=2)
def test_training_with_clipping_is_that_of_one_process(rpc_world):
    if rpc_world.rank == 0:
        parts, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.Adam, weights, lr=0.1)
        local_parts = [Part(1), Part(2)]
        local = optim.Adam([part.weight for part in local_parts], lr=0.1)
        for step in range(STEPS):
            remote_step(parts, optimizer, step, max_norm=0.1)
            local_step(local_parts, local, step, max_norm=0.1)
        assert_equal(weights, local_parts)


class Table:
    """An embedding whose gradient is sparse."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        values = torch.rand((6, 2), generator=generator, dtype=torch.float64)
        self.module = nn.Embedding(6, 2, sparse=True, _weight=values)

    def forward(self, rows):
        return self.module(rows)

    def weight_rref(self):
        return rpc.RRef(self.module.weight)


@pytest.mark.mpi(min_size=2)
def test_clipping_of_sparse_gradients(rpc_world):
    """A row that is looked up twice has two entries in the gradient, which count added up."""
    if rpc_world.rank == 0:
        table, part = rpc.remote(1, Table), rpc.remote(rpc_world.size - 1, Part, args=(1,))
        rows = torch.tensor([1, 4, 1])
        weights = [table.rpc_sync().weight_rref(), part.rpc_sync().weight_rref()]
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=1.0)
        with autograd.context() as context_id:
            loss = table.rpc_sync().forward(rows).sum() + part.rpc_sync().get_weight().sum()
            autograd.backward(context_id, [loss])
            total = optimizer.clip_grad_norm(context_id, 0.5)
            optimizer.step(context_id)
        dense = torch.zeros((6, 2), dtype=torch.float64)
        dense[1], dense[4] = 2.0, 1.0
        expected = torch.linalg.vector_norm(torch.cat([dense.flatten(), torch.ones(9, dtype=torch.float64)]))
        torch.testing.assert_close(total, expected)
        factor = 0.5 / (expected + 1e-6)
        torch.testing.assert_close(weights[0].to_here().detach(), Table().module.weight - factor * dense)
        torch.testing.assert_close(weights[1].to_here().detach(), Part(1).weight - factor)


@pytest.mark.mpi(min_size=2)
def test_shared_parameter_counts_once_in_the_norm(rpc_world):
    if rpc_world.rank == 0:
        part = rpc.remote(1, Part, args=(1,))
        weights = [part.rpc_sync().weight_rref() for _ in range(2)]
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [sum(weight.to_here().sum() for weight in weights)])
            assert optimizer.clip_grad_norm(context_id, 100.0) == 6.0  # nine gradients of 2


@pytest.mark.mpi(min_size=2)
def test_norm_that_is_not_finite(rpc_world):
    if rpc_world.rank == 0:
        part = rpc.remote(1, Part, args=(1,))
        optimizer = DistributedOptimizer(optim.SGD, [part.rpc_sync().weight_rref()], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [(part.rpc_sync().get_weight() * math.inf).sum()])
            with pytest.raises(AutogradError, match=r"norm of order 2\.0 is non-finite \(inf\)"):
                optimizer.clip_grad_norm(context_id, 1.0, error_if_nonfinite=True)
            assert gradient_of(part, context_id).isinf().all()
            assert optimizer.clip_grad_norm(context_id, 1.0).isinf()
            assert gradient_of(part, context_id).isnan().all()  # as in torch


@pytest.mark.mpi(min_size=2)
def test_clipping_without_gradients_and_without_a_context(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=1.0)
        with autograd.context() as context_id:
            assert optimizer.clip_grad_norm(context_id, 1.0) == 0.0
        with pytest.raises(AutogradError):
            optimizer.clip_grad_norm(context_id, 1.0)


# --- .grad ---


@pytest.mark.mpi(min_size=2)
def test_zero_grad_clears_grad_and_leaves_contexts_alone(rpc_world):
    if rpc_world.rank == 0:
        parts, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=1.0)
        for part in parts:
            part.rpc_sync().set_grad(7.0)
        with autograd.context() as context_id:
            remote_backward(context_id, parts, 0)
            before = gradient_of(parts[0], context_id)
            optimizer.zero_grad(set_to_none=False)
            assert [part.rpc_sync().grad_value() for part in parts] == [0.0, 0.0]
            optimizer.zero_grad()
            assert [part.rpc_sync().grad_value() for part in parts] == [None, None]
            assert torch.equal(gradient_of(parts[0], context_id), before)


# --- state ---

STATEFUL = [
    (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.05}),
    (optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (optim.Adagrad, {"lr": 0.05}),
    (optim.RMSprop, {"lr": 0.05, "momentum": 0.9}),
    (optim.NAdam, {"lr": 0.05}),
]


def through_a_file(state):
    """Store and load as a careful program would: nothing but tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(state):
    """The part of a state that torch.optim knows."""
    return {key: state[key] for key in ("state", "param_groups")}


@pytest.mark.mpi(min_size=2)
def test_state_is_that_of_one_process_and_goes_both_ways(rpc_world):
    """Half of the training here, half there, in both orders: the same weights as in one go."""
    if rpc_world.rank == 0:
        for optimizer_class, options in STATEFUL:
            parts, weights = make_parts(rpc_world)
            groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.01}]
            optimizer = DistributedOptimizer(optimizer_class, groups, **options)
            local_parts = [Part(1), Part(2)]
            local_groups = [
                {"params": [local_parts[0].weight]},
                {"params": [local_parts[1].weight], "lr": 0.01},
            ]
            local = optimizer_class(local_groups, **options)
            for step in range(2):
                remote_step(parts, optimizer, step)
                local_step(local_parts, local, step)
            state = through_a_file(optimizer.state_dict())
            torch.testing.assert_close(plain(state), local.state_dict(), rtol=0, atol=0)

            resumed = DistributedOptimizer(optimizer_class, groups, lr=99.0)
            resumed.load_state_dict(local.state_dict())
            local_resumed = optimizer_class([{"params": group["params"]} for group in local_groups], lr=99.0)
            local_resumed.load_state_dict(state)
            for step in range(2, STEPS):
                remote_step(parts, resumed, step)
                local_step(local_parts, local_resumed, step)
            assert_equal(weights, local_parts)
            assert [group["lr"] for group in resumed.param_groups] == [0.05, 0.01]


@pytest.mark.mpi(min_size=2)
def test_state_moves_to_other_owners(rpc_world):
    """A state belongs to the parameters, whatever workers they are on."""
    if rpc_world.rank == 0:
        parts, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.Adam, weights, lr=0.1)
        local_parts = [Part(1), Part(2)]
        local = optim.Adam([part.weight for part in local_parts], lr=0.1)
        for step in range(2):
            remote_step(parts, optimizer, step)
            local_step(local_parts, local, step)
        moved_parts = [rpc.remote(0, Part, args=(1,)), rpc.remote(1, Part, args=(2,))]
        for new, old in zip(moved_parts, weights, strict=True):
            rpc.rpc_sync(new.owner(), set_weight, args=(new, old.to_here().detach()))
        moved_weights = [part.rpc_sync().weight_rref() for part in moved_parts]
        resumed = DistributedOptimizer(optim.Adam, moved_weights)
        resumed.load_state_dict(optimizer.state_dict())
        for step in range(2, STEPS):
            remote_step(moved_parts, resumed, step)
            local_step(local_parts, local, step)
        assert_equal(moved_weights, local_parts)


def set_weight(part, value):
    with torch.no_grad():
        part.local_value().weight.copy_(value)


@pytest.mark.mpi(min_size=2)
def test_state_holds_options_that_are_changed_and_not_yet_stepped_with(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.5)
        optimizer.param_groups[0]["lr"] = 0.25
        state = optimizer.state_dict()
        assert state["param_groups"][0]["lr"] == 0.25
        optimizer.param_groups[0]["lr"] = 4.0
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.25
        parts = [Part(1), Part(2)]
        with autograd.context() as context_id:
            autograd.backward(context_id, [sum(weight.to_here().sum() for weight in weights)])
            optimizer.step(context_id)
        for weight, part in zip(weights, parts, strict=True):
            assert torch.equal(weight.to_here().detach(), part.weight.detach() - 0.25)


@pytest.mark.mpi(min_size=2)
def test_state_numbers_a_parameter_that_is_named_twice_once(rpc_world):
    if rpc_world.rank == 0:
        part = rpc.remote(1, Part, args=(1,))
        other = rpc.remote(rpc_world.size - 1, Part, args=(2,)).rpc_sync().weight_rref()
        weights = [part.rpc_sync().weight_rref(), part.rpc_sync().weight_rref(), other]
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.5, momentum=0.9)
        with autograd.context() as context_id:
            autograd.backward(context_id, [weights[0].to_here().sum() + 3 * other.to_here().sum()])
            optimizer.step(context_id)
        state = optimizer.state_dict()
        assert state["param_groups"][0]["params"] == [0, 1]
        assert [state["state"][n]["momentum_buffer"][0, 0].item() for n in (0, 1)] == [1.0, 3.0]
        optimizer.load_state_dict(state)
        torch.testing.assert_close(plain(optimizer.state_dict()), plain(state), rtol=0, atol=0)


@pytest.mark.mpi(min_size=2)
def test_state_that_does_not_fit_is_refused_with_all_that_differs(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        wide = rpc.RRef(torch.zeros(5, requires_grad=True))
        optimizer = DistributedOptimizer(optim.SGD, [*weights, wide], lr=0.5)
        state = DistributedOptimizer(optim.Adam, [wide, weights[0]], lr=0.1).state_dict()
        with pytest.raises(ValueError, match="does not fit") as caught:
            optimizer.load_state_dict(state)
        assert str(caught.value).splitlines() == [
            "the state does not fit this optimizer:",
            "  state of Adam; this is SGD",
            "  parameter 0 of shape (5,); here it has (3, 3)",
            "  groups of [2] parameters; this optimizer has groups of [3]",
        ]
        assert optimizer.param_groups[0]["lr"] == 0.5
        with pytest.raises(ValueError, match="no state of an optimizer: it has no state and no param_groups"):
            optimizer.load_state_dict({})
        fitting = plain(optimizer.state_dict())
        with pytest.raises(ValueError, match="state of a parameter 7 in no group"):
            optimizer.load_state_dict({**fitting, "state": {7: {}}})


class CountsForItself(optim.SGD):
    """Keeps an option of its own, and state that is of no parameter."""

    def __init__(self, params, lr, in_state):
        super().__init__(params, lr)
        self.in_state = in_state
        for group in self.param_groups:
            group["seen_on"] = "nowhere"

    def step(self, closure=None):
        super().step(closure)
        if self.in_state:
            self.state["steps"] = 1
        else:
            self.param_groups[0]["seen_on"] = rpc.get_worker_info().name


@pytest.mark.mpi(min_size=2)
def test_state_that_has_no_place_in_one_dict_is_refused(rpc_world):
    if rpc_world.rank == 0:
        here, there = Part(1), rpc.remote(1, Part, args=(2,))
        weights = [here.weight_rref(), there.rpc_sync().weight_rref()]
        for in_state, error, text in [
            (
                True,
                OptimizerError,
                r"TypeError: CountsForItself keeps state that is of no parameter: \['steps'\]",
            ),
            (
                False,
                ValueError,
                "option 'seen_on' of parameter group 0 is 'worker0' at one owner and 'worker1'",
            ),
        ]:
            optimizer = DistributedOptimizer(CountsForItself, weights, lr=0.1, in_state=in_state)
            with autograd.context() as context_id:
                autograd.backward(context_id, [sum(weight.to_here().sum() for weight in weights)])
                optimizer.step(context_id)
            with pytest.raises(error, match=text):
                optimizer.state_dict()


@pytest.mark.mpi(min_size=2)
def test_hooks_of_states_run_at_the_caller(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.5)
        seen = []
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["note"]))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["saving", 1, "loaded"]
