"""mpirpc.param_groups and mpirpc.optim over real ranks: groups, options that change, schedulers.

Rank 0 calls; the parameters live on worker1 and on the last worker (the same one at two ranks).
"""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import OptimizerError
from mpirpc.optim import DistributedOptimizer
from tests.mpi.optim_parts import STEPS, Part, assert_equal, local_step, make_parts, remote_step

# --- groups ---

GROUPED = [
    (optim.SGD, {"lr": 0.01, "momentum": 0.5}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 0.01}, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.01}, {"lr": 0.001, "amsgrad": True}),
    (optim.Adagrad, {}, {"lr": 0.5, "lr_decay": 0.1}),
    (optim.RMSprop, {"lr": 0.01}, {"momentum": 0.9, "centered": True}),
]


@pytest.mark.mpi(min_size=2)
def test_groups_are_those_of_one_process(rpc_world):
    """The groups overlap in owners: at two ranks both are at worker1, at four each has one of its own."""
    if rpc_world.rank == 0:
        for optimizer_class, options, of_second in GROUPED:
            parts, weights = make_parts(rpc_world)
            groups = [{"params": [weights[0]]}, {"params": weights[1], **of_second}]
            optimizer = DistributedOptimizer(optimizer_class, groups, **options)
            local_parts = [Part(1), Part(2)]
            local_groups = [
                {"params": [local_parts[0].weight]},
                {"params": local_parts[1].weight, **of_second},
            ]
            local = optimizer_class(local_groups, **options)
            for step in range(STEPS):
                remote_step(parts, optimizer, step)
                local_step(local_parts, local, step)
            assert_equal(weights, local_parts)
            assert [options_of(group) for group in optimizer.param_groups] == [
                options_of(group) for group in local.param_groups
            ]


def options_of(group):
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.mpi(min_size=2)
def test_group_of_many_owners_and_a_group_that_some_owners_lack(rpc_world):
    if rpc_world.rank == 0:
        parts = [Part(rank) for rank in range(rpc_world.size)]
        weights = [
            rpc.remote(rank, Part, args=(rank,)).rpc_sync().weight_rref() for rank in range(rpc_world.size)
        ]
        extra = rpc.remote(1, Part, args=(50,)).rpc_sync().weight_rref()
        groups = [{"params": []}, {"params": weights, "lr": 1.0}, {"params": [extra], "lr": 8.0}]
        optimizer = DistributedOptimizer(optim.SGD, groups, lr=0.5)
        assert [len(group["params"]) for group in optimizer.param_groups] == [0, rpc_world.size, 1]
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0, 8.0]
        assert optimizer.param_groups[1]["params"] == weights
        step_by_ones(optimizer, [*weights, extra])
        optimizer.param_groups[2]["lr"] = 0.25  # the group that worker0 has no part in
        step_by_ones(optimizer, [*weights, extra])
        for weight, part in zip(weights, parts, strict=True):
            assert torch.equal(weight.to_here().detach(), part.weight.detach() - 1.0 - 1.0)
        assert torch.equal(extra.to_here().detach(), Part(50).weight.detach() - 8.0 - 0.25)


def step_by_ones(optimizer, weights):
    """A step in which every gradient is one everywhere: plain SGD takes the learning rate off the weights."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [sum(weight.to_here().sum() for weight in weights)])
        optimizer.step(context_id)


@pytest.mark.mpi(min_size=2)
def test_added_group_at_a_known_and_at_a_new_owner(rpc_world):
    if rpc_world.rank == 0:
        here, there = Part(1), rpc.remote(1, Part, args=(2,))
        first, added = there.rpc_sync().weight_rref(), rpc.remote(1, Part, args=(3,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [first], lr=0.5)
        step_by_ones(optimizer, [first])
        optimizer.add_param_group({"params": [added, here.weight_rref()], "lr": 2.0})
        assert len(optimizer.remote_optimizers) == 2
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
        step_by_ones(optimizer, [first, added, here.weight_rref()])
        assert torch.equal(first.to_here().detach(), Part(2).weight.detach() - 0.5 - 0.5)
        assert torch.equal(added.to_here().detach(), Part(3).weight.detach() - 2.0)
        assert torch.equal(here.weight.detach(), Part(1).weight.detach() - 2.0)
        with pytest.raises(OptimizerError, match="appear in more than one parameter group"):
            optimizer.add_param_group({"params": [first]})


@pytest.mark.mpi(min_size=2)
def test_parameter_that_is_named_twice_is_stepped_once(rpc_world):
    if rpc_world.rank == 0:
        part = rpc.remote(1, Part, args=(1,))
        weight, again = part.rpc_sync().weight_rref(), part.rpc_sync().weight_rref()
        other = rpc.remote(1, Part, args=(2,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [weight, again, other], lr=0.5)
        assert optimizer.param_groups[0]["params"] == [weight, other]
        step_by_ones(optimizer, [weight, other])
        assert torch.equal(weight.to_here().detach(), Part(1).weight.detach() - 0.5)
        with pytest.raises(OptimizerError, match="appear in more than one parameter group"):
            DistributedOptimizer(optim.SGD, [{"params": [weight]}, {"params": [again]}], lr=0.5)


@pytest.mark.mpi(min_size=2)
def test_groups_that_are_none(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        with pytest.raises(
            TypeError, match=r"params_rref\[1\] must be a parameter group, a dict with 'params'"
        ):
            DistributedOptimizer(optim.SGD, [{"params": weights}, weights[0]], lr=0.1)
        with pytest.raises(
            TypeError, match=r"params_rref\[0\] must be a parameter group, a dict with 'params'"
        ):
            DistributedOptimizer(optim.SGD, [{"lr": 0.1}], lr=0.1)
        with pytest.raises(
            TypeError,
            match=r"params_rref\[0\]\['params'\]\[0\] must be an RRef to a parameter, not Parameter",
        ):
            DistributedOptimizer(optim.SGD, [{"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)
        with pytest.raises(TypeError, match=r"params_rref\[0\] has its parameters in a set"):
            DistributedOptimizer(optim.SGD, [{"params": set(weights)}], lr=0.1)
        with pytest.raises(ValueError, match="params_rref has empty groups only"):
            DistributedOptimizer(optim.SGD, [{"params": []}], lr=0.1)
        with pytest.raises(OptimizerError, match="TypeError: parameter 0 is no tensor but a Part"):
            DistributedOptimizer(optim.SGD, [rpc.remote(1, Part, args=(1,))], lr=0.1)


# --- options ---


@pytest.mark.mpi(min_size=2)
def test_option_that_is_changed_at_the_caller_acts_from_the_next_step_on(rpc_world):
    if rpc_world.rank == 0:
        weight = rpc.remote(1, Part, args=(1,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=0.5)
        step_by_ones(optimizer, [weight])
        optimizer.param_groups[0]["lr"] = 2.0
        step_by_ones(optimizer, [weight])
        step_by_ones(optimizer, [weight])
        assert torch.equal(weight.to_here().detach(), Part(1).weight.detach() - 0.5 - 2.0 - 2.0)


@pytest.mark.mpi(min_size=2)
def test_option_that_a_failed_step_brought_is_taken_back(rpc_world):
    """The owner has the new rate although the step failed; the old one must be sent again."""
    if rpc_world.rank == 0:
        weight = rpc.remote(1, Part, args=(1,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(RefusesLargeRates, [weight], lr=0.5)
        optimizer.param_groups[0]["lr"] = 8.0
        with pytest.raises(OptimizerError, match=r"ArithmeticError: lr 8\.0 is too large"):
            step_by_ones(optimizer, [weight])
        optimizer.param_groups[0]["lr"] = 0.5
        step_by_ones(optimizer, [weight])
        assert torch.equal(weight.to_here().detach(), Part(1).weight.detach() - 0.5)


class RefusesLargeRates(optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["lr"] > 1:
            raise ArithmeticError(f"lr {self.param_groups[0]['lr']} is too large")
        return super().step(closure)


@pytest.mark.mpi(min_size=2)
def test_optimizer_sent_to_another_worker_steps_the_same_parameters_with_options_of_its_own(rpc_world):
    if rpc_world.rank == 0:
        weight = rpc.remote(1, Part, args=(1,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=0.5)
        rpc.rpc_sync(rpc_world.size - 1, step_with_rate, args=(optimizer, weight, 2.0))
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert torch.equal(weight.to_here().detach(), Part(1).weight.detach() - 2.0)


def step_with_rate(optimizer, weight, rate):
    optimizer.param_groups[0]["lr"] = rate
    step_by_ones(optimizer, [weight])


# --- schedulers ---

SCHEDULERS = [
    (optim.SGD, {"lr": 0.1}, lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5)),
    (optim.Adam, {"lr": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8)),
    (optim.Adam, {"lr": 0.1}, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=9)),
    (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.5},
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.5, 0.1], total_steps=9),
    ),
    (optim.SGD, {"lr": 0.1}, lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n, lambda n: 1 / (n + 1)])),
    (
        optim.SGD,
        {"lr": 0.1},
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, gamma=0.5)],
            milestones=[3],
        ),
    ),
    (
        optim.Adam,
        {"lr": torch.tensor(0.1, dtype=torch.float64)},
        lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    ),
]


@pytest.mark.mpi(min_size=2)
def test_schedulers_of_torch_do_what_they_do_in_one_process(rpc_world):
    """pytorch#38548: a wish for learning rate schedulers with DistributedOptimizer."""
    if rpc_world.rank == 0:
        for optimizer_class, options, make_scheduler in SCHEDULERS:
            parts, weights = make_parts(rpc_world)
            optimizer = DistributedOptimizer(
                optimizer_class, [{"params": [w], "weight_decay": 0.01} for w in weights], **copied(options)
            )
            local_parts = [Part(1), Part(2)]
            local = optimizer_class(
                [{"params": [part.weight], "weight_decay": 0.01} for part in local_parts], **copied(options)
            )
            scheduler, local_scheduler = make_scheduler(optimizer), make_scheduler(local)
            for step in range(8):
                remote_step(parts, optimizer, step)
                local_step(local_parts, local, step)
                scheduler.step()
                local_scheduler.step()
                assert scheduler.get_last_lr() == local_scheduler.get_last_lr()
                assert_equal(weights, local_parts)


def copied(options):
    """Copy tensors: schedulers change them in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }


@pytest.mark.mpi(min_size=2)
def test_scheduler_that_looks_at_the_loss(rpc_world):
    if rpc_world.rank == 0:
        weight = rpc.remote(1, Part, args=(1,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.25)
        for loss in (1.0, 1.0):  # no better: the rate falls
            step_by_ones(optimizer, [weight])
            scheduler.step(loss)
        step_by_ones(optimizer, [weight])
        assert torch.equal(weight.to_here().detach(), Part(1).weight.detach() - 1.0 - 1.0 - 0.25)


@pytest.mark.mpi(min_size=2)
def test_hooks_of_steps_run_at_the_caller(rpc_world):
    if rpc_world.rank == 0:
        weight = rpc.remote(1, Part, args=(1,)).rpc_sync().weight_rref()
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        step_by_ones(optimizer, [weight])
        assert seen == ["before", "after"]
