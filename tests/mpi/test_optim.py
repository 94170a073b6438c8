"""mpirpc.optim over real ranks: updates are those of one process, and concurrent steps do not mix.

Rank 0 calls; the parameters live on worker1 and on the last worker (the same one at two ranks).
"""

import threading

import pytest
import torch
from torch import nn, optim

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError, OptimizerError, RemoteError
from mpirpc.optim import DistributedOptimizer
from tests.mpi.optim_parts import STEPS, Part, assert_equal, inputs, local_step, make_parts, remote_step

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05}),
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adamax, {"lr": 0.05}),
    (optim.ASGD, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05}),
    (optim.RAdam, {"lr": 0.05}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.05}),
]


def trained(parts, optimizer_class, **options):
    """Train parts in this process."""
    optimizer = optimizer_class([part.weight for part in parts], **options)
    for step in range(STEPS):
        local_step(parts, optimizer, step)
    return parts


# --- updates ---


@pytest.mark.mpi(min_size=2)
def test_updates_are_those_of_one_process(rpc_world):
    if rpc_world.rank == 0:
        for optimizer_class, options in OPTIMIZERS:
            parts, weights = make_parts(rpc_world)
            optimizer = DistributedOptimizer(optimizer_class, weights, **options)
            for step in range(STEPS):
                remote_step(parts, optimizer, step)
            assert_equal(weights, trained([Part(1), Part(2)], optimizer_class, **options))


@pytest.mark.mpi(min_size=2)
def test_weight_that_needs_no_gradient_stays(rpc_world):
    if rpc_world.rank == 0:
        for optimizer_class in (optim.SGD, optim.RMSprop, optim.Adadelta):
            parts, weights = make_parts(rpc_world, requires_grad=False)
            optimizer = DistributedOptimizer(optimizer_class, weights, lr=0.05)
            for step in range(STEPS):
                remote_step(parts, optimizer, step)
            assert torch.equal(weights[0].to_here(), Part(1).weight)
            assert_equal(weights, trained([Part(1, False), Part(2)], optimizer_class, lr=0.05))


@pytest.mark.mpi(min_size=2)
def test_owner_that_the_context_never_reached_is_left_alone(rpc_world):
    if rpc_world.rank == 0:
        here = Part(1)
        there = rpc.remote(1, Part, args=(2,))
        weights = [here.weight_rref(), there.rpc_sync().weight_rref()]
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.5, momentum=0.9)
        with autograd.context() as context_id:
            autograd.backward(context_id, [here.weight.sum()])
            optimizer.step(context_id)
        torch.testing.assert_close(here.weight.detach(), Part(1).weight.detach() - 0.5)
        assert torch.equal(weights[1].to_here().detach(), Part(2).weight.detach())


@pytest.mark.mpi(min_size=2)
def test_grad_of_the_parameters_is_afterwards_as_before(rpc_world):
    if rpc_world.rank == 0:
        parts, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.1)
        parts[0].rpc_sync().set_grad(7.0)
        remote_step(parts, optimizer, 0)
        assert parts[0].rpc_sync().grad_value() == 7.0
        assert parts[1].rpc_sync().grad_value() is None


@pytest.mark.mpi(min_size=2)
def test_module_trained_through_local_and_remote_parameters(rpc_world):
    """One optimizer over parameters of this worker and of another."""
    if rpc_world.rank == 0:
        here, there = Part(1), rpc.remote(1, Part, args=(2,))
        weights = [here.weight_rref(), there.rpc_sync().weight_rref()]
        optimizer = DistributedOptimizer(optim.Adam, weights, lr=0.05)
        for step in range(STEPS):
            with autograd.context() as context_id:
                loss = there.rpc_sync().forward(here.forward(inputs(step))).sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        assert_equal(weights, trained([Part(1), Part(2)], optim.Adam, lr=0.05))


# --- errors ---


class FailsToBeMade(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        raise ValueError(f"cannot make it on {rpc.get_worker_info().name}")


class FailsToStep(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise ArithmeticError(f"cannot step on {rpc.get_worker_info().name}")


@pytest.mark.mpi(min_size=2)
def test_all_owners_that_cannot_make_their_optimizer_are_named(rpc_world):
    if rpc_world.rank == 0:
        here, there = Part(1), rpc.remote(1, Part, args=(2,))
        weights = [here.weight_rref(), there.rpc_sync().weight_rref()]
        with pytest.raises(OptimizerError) as caught:
            DistributedOptimizer(FailsToBeMade, weights)
        assert str(caught.value).splitlines() == [
            "creating FailsToBeMade failed on 2 of 2 workers",
            "  'worker0' (rank 0): ValueError: cannot make it on worker0",
            "  'worker1' (rank 1): ValueError: cannot make it on worker1",
        ]
        assert isinstance(caught.value.__cause__, ValueError)
        assert isinstance(caught.value, RemoteError)
        (first, at_first), (second, at_second) = caught.value.failures
        assert (first, second) == ("'worker0' (rank 0)", "'worker1' (rank 1)")
        assert str(at_first) == "cannot make it on worker0"
        assert str(at_second) == "cannot make it on worker1"


def make_one_that_fails(weight):
    DistributedOptimizer(FailsToBeMade, [weight])


@pytest.mark.mpi(min_size=2)
def test_error_of_an_optimizer_travels_on_whole(rpc_world):
    """A trainer that is itself a callee hands the error, with all causes, to its caller."""
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        with pytest.raises(OptimizerError) as caught:
            rpc.rpc_sync(1, make_one_that_fails, args=(weights[0],))
        ((worker, cause),) = caught.value.failures
        assert worker == "'worker1' (rank 1)"
        assert isinstance(cause, ValueError)


@pytest.mark.mpi(min_size=2)
def test_wrong_option_is_reported_by_the_constructor(rpc_world):
    """pytorch#30062, pytorch#30022: errors of remote constructors showed late."""
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        with pytest.raises(RemoteError, match=r"'worker1' \(rank 1\): ValueError: Invalid learning rate: -1"):
            DistributedOptimizer(optim.SGD, weights, lr=-1)


@pytest.mark.mpi(min_size=2)
def test_failed_step_is_reported_restores_grad_and_leaves_all_usable(rpc_world):
    if rpc_world.rank == 0:
        parts, weights = make_parts(rpc_world)
        parts[0].rpc_sync().set_grad(7.0)
        with pytest.raises(RemoteError, match="ArithmeticError: cannot step on worker1"):
            remote_step(parts, DistributedOptimizer(FailsToStep, weights), 0)
        assert parts[0].rpc_sync().grad_value() == 7.0
        remote_step(parts, DistributedOptimizer(optim.SGD, weights, lr=0.1), 0)


@pytest.mark.mpi(min_size=2)
def test_step_in_an_unknown_context(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.1)
        with autograd.context() as context_id:
            pass
        with pytest.raises(AutogradError):
            optimizer.step(context_id)


@pytest.mark.mpi(min_size=2)
def test_refused_arguments(rpc_world):
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        with pytest.raises(TypeError, match=r"LBFGS cannot be distributed: its step\(\) needs a closure"):
            DistributedOptimizer(optim.LBFGS, weights)
        with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer class, not <class 'dict'>"):
            DistributedOptimizer(dict, weights)
        with pytest.raises(ValueError, match="params_rref is empty"):
            DistributedOptimizer(optim.SGD, [], lr=0.1)
        with pytest.raises(
            TypeError, match=r"params_rref\[1\] must be an RRef to a parameter, not Parameter"
        ):
            DistributedOptimizer(optim.SGD, [weights[0], nn.Parameter(torch.ones(1))], lr=0.1)


# --- concurrency ---


class Watched(optim.SGD):
    """Counts how many steps run at once on this worker."""

    lock = threading.Lock()
    running = 0
    most = 0
    meeting = threading.Barrier(2)

    def __init__(self, params, must_meet=False):
        super().__init__(params, lr=1.0)
        self.must_meet = must_meet

    def step(self, closure=None):
        with Watched.lock:
            Watched.running += 1
            Watched.most = max(Watched.most, Watched.running)
        if self.must_meet:
            Watched.meeting.wait(timeout=20)
        super().step()
        with Watched.lock:
            Watched.running -= 1


def most_at_once():
    most, Watched.most = Watched.most, 0
    return most


def step_often(part, weight, times):
    """A trainer of its own: its gradients are ones, so each of its steps takes one off the weight."""
    optimizer = DistributedOptimizer(Watched, [weight])
    for _ in range(times):
        with autograd.context() as context_id:
            autograd.backward(context_id, [part.rpc_sync().get_weight().sum()])
            optimizer.step(context_id)


@pytest.mark.mpi(min_size=2)
def test_steps_of_all_workers_on_one_parameter_take_turns_and_all_count(rpc_world):
    """pytorch#29304: steps exclude each other at an owner."""
    if rpc_world.rank == 0:
        part = rpc.remote(1, Part, args=(1,))
        weight = part.rpc_sync().weight_rref()
        rpc.rpc_sync(1, most_at_once)
        trainers = [rank for rank in range(rpc_world.size) for _ in range(2)]
        runs = [rpc.rpc_async(rank, step_often, args=(part, weight, 5)) for rank in trainers]
        torch.futures.wait_all(runs)
        assert rpc.rpc_sync(1, most_at_once) == 1
        expected = Part(1).weight.detach() - 5 * len(trainers)
        torch.testing.assert_close(weight.to_here().detach(), expected)


@pytest.mark.mpi(min_size=2)
def test_steps_on_different_parameters_of_a_worker_run_side_by_side(rpc_world):
    """Each of the two steps waits inside for the other: a lock over both would never let them meet."""
    if rpc_world.rank == 0:
        parts = [rpc.remote(1, Part, args=(seed,)) for seed in (1, 2)]
        optimizers = [
            DistributedOptimizer(Watched, [part.rpc_sync().weight_rref()], must_meet=True) for part in parts
        ]
        with autograd.context() as context_id:
            loss = sum(part.rpc_sync().get_weight().sum() for part in parts)
            autograd.backward(context_id, [loss])
            threads = [threading.Thread(target=o.step, args=(context_id,)) for o in optimizers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert rpc.rpc_sync(1, most_at_once) == 2


@pytest.mark.mpi(min_size=2)
def test_optimizers_made_at_once_by_several_threads(rpc_world):
    """pytorch#45871, pytorch#46071: optimizers made at the same time failed."""
    if rpc_world.rank == 0:
        _, weights = make_parts(rpc_world)
        made = []
        threads = [
            threading.Thread(target=lambda: made.append(DistributedOptimizer(optim.Adam, weights)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 4
