"""Unit tests for mpirpc._core.autograd_hooks: hooks of leaves see each gradient of a pass once, and whole."""

import subprocess
import sys
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc._core.parameter_locks import PARAMETER_LOCKS, ParameterLocks
from mpirpc.testing import LoopbackCluster

LIMIT = 30.0


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


def leaf(*numbers):
    return torch.tensor(numbers, requires_grad=True)


def loss_of(a, times=1):
    """A sum to which ``a`` contributes here and over worker 1, once per time: components of their own."""
    return sum(rpc.rpc_sync("worker1", torch.mul, args=(a, 2.0)).sum() for _ in range(times)) + a.sum()


@pytest.mark.parametrize("times", [1, 3])
def test_post_accumulate_hook_sees_the_whole_gradient_in_grad(cluster, times):
    a, seen = leaf(1.0, 2.0), []
    a.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a, times)])
        assert autograd.get_gradients(context_id)[a].tolist() == [2.0 * times + 1] * 2
    assert [grad.tolist() for grad in seen] == [[2.0 * times + 1] * 2]
    assert a.grad is None


def test_hook_of_the_node_runs_once(cluster):
    a, calls = leaf(1.0), []
    node = (a * 1).grad_fn.next_functions[0][0]
    node.register_hook(lambda grad_inputs, grad_outputs: calls.append(grad_outputs))
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a)])
    assert [[grad.tolist() for grad in grads] for grads in calls] == [[[3.0]]]


def test_hooks_may_change_the_gradient(cluster):
    """As DDP does, which puts the mean over its ranks into ``.grad``."""
    a = leaf(1.0)
    a.register_post_accumulate_grad_hook(lambda t: setattr(t, "grad", t.grad * 10))
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a)])
        assert autograd.get_gradients(context_id)[a].item() == 30.0


def test_tensor_hooks_run_once(cluster):
    a = leaf(1.0)
    a.register_hook(lambda grad: grad * 2)
    a.register_post_accumulate_grad_hook(lambda t: None)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a)])
        assert autograd.get_gradients(context_id)[a].item() == 6.0
    (a * 1).sum().backward()
    assert a.grad.item() == 2.0  # the hook is still there


def test_grad_is_what_it_was(cluster):
    a = leaf(1.0)
    a.grad = before = torch.tensor([7.0])
    a.register_post_accumulate_grad_hook(lambda t: None)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a)])
    assert a.grad is before
    assert before.item() == 7.0


def test_passes_add_up(cluster):
    a, calls = leaf(1.0), []
    a.register_post_accumulate_grad_hook(calls.append)
    with autograd.context() as context_id:
        loss = loss_of(a)
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[a].item() == 6.0
    assert len(calls) == 2


def test_contexts_stay_apart(cluster):
    """Passes of several threads over one leaf with a hook: each sees its own gradient only."""
    a = leaf(1.0)
    a.register_post_accumulate_grad_hook(lambda t: None)
    found = {}

    def train(factor):
        with cluster.on(0), autograd.context() as context_id:
            for _ in range(5):
                autograd.backward(context_id, [loss_of(a) * factor])
            found[factor] = autograd.get_gradients(context_id)[a].item()

    threads = [threading.Thread(target=train, args=(factor,)) for factor in (1, 10, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert found == {1: 15.0, 10: 150.0, 100: 1500.0}
    assert a.grad is None


PARAMETER = torch.tensor([2.0], requires_grad=True)


def scaled(x):
    return x * PARAMETER


def gradient_of_parameter(context_id):
    return autograd.get_gradients(context_id)[PARAMETER]


def test_hook_at_the_callee(cluster):
    seen = []
    handle = PARAMETER.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.item()))
    try:
        with autograd.context() as context_id:
            x = leaf(3.0)
            loss = rpc.rpc_sync("worker1", scaled, args=(x,)) + rpc.rpc_sync("worker1", scaled, args=(x * 2,))
            autograd.backward(context_id, [loss.sum()])
            assert rpc.rpc_sync("worker1", gradient_of_parameter, args=(context_id,)).item() == 9.0
    finally:
        handle.remove()
    assert seen == [9.0]


def test_hook_that_raises_fails_the_pass(cluster):
    a = leaf(1.0)

    def refuse(t):
        raise ValueError("not today")

    handle = a.register_post_accumulate_grad_hook(refuse)
    with autograd.context() as context_id, pytest.raises(ValueError, match="not today"):
        autograd.backward(context_id, [loss_of(a)])
    assert a.grad is None
    handle.remove()
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a)])
        assert autograd.get_gradients(context_id)[a].item() == 3.0


def test_optimizer_that_steps_in_a_hook(cluster):
    """The hook uses the gradient up: there is none to put into the context."""
    a, b = leaf(1.0), leaf(1.0)
    optimizer = torch.optim.SGD([a], lr=0.1)

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    a.register_post_accumulate_grad_hook(step)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a) + loss_of(b)])
        found = autograd.get_gradients(context_id)
        assert set(found) == {b}
    assert a.item() == pytest.approx(0.7)


@pytest.mark.parametrize("dense_first", [True, False])
def test_sparse_and_dense_gradients_of_one_leaf(cluster, dense_first):
    weight = torch.ones(3, 2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda t: None)
    with autograd.context() as context_id:
        rows = torch.nn.functional.embedding(torch.tensor([0, 0]), weight, sparse=True)
        parts = [
            rpc.rpc_sync("worker1", torch.mul, args=(weight * 1, 2.0)).sum(),
            rpc.rpc_sync("worker1", torch.mul, args=(rows, 1.0)).sum(),
        ]
        first, second = parts if dense_first else parts[::-1]
        autograd.backward(context_id, [first, second])
        assert autograd.get_gradients(context_id)[weight].to_dense().tolist() == [[4, 4], [2, 2], [2, 2]]


def test_tensor_hooks_of_other_passes_run_meanwhile(cluster):
    """One pass is in a hook of the leaf; another one goes through it, and its tensor hook runs."""
    a = leaf(1.0)
    a.register_hook(lambda grad: grad * 10)
    inside, go_on = threading.Event(), threading.Event()

    def post(_):
        if not inside.is_set():
            inside.set()
            go_on.wait(LIMIT)

    a.register_post_accumulate_grad_hook(post)
    found = {}

    def train(name):
        with cluster.on(0), autograd.context() as context_id:
            autograd.backward(context_id, [(a * 1.0).sum()])
            found[name] = autograd.get_gradients(context_id)[a].item()

    first = threading.Thread(target=train, args=("first",))
    first.start()
    assert inside.wait(LIMIT)
    second = threading.Thread(target=train, args=("second",))
    second.start()
    while not cluster.runtimes[0].autograd.stats().passes >= 2:
        assert second.is_alive()
    go_on.set()
    first.join(LIMIT)
    second.join(LIMIT)
    assert found == {"first": 10.0, "second": 10.0}


def test_hook_of_one_leaf_keeps_no_other_leaf(cluster):
    """It may wait for another worker, whose pass may need the other one."""
    a, b, was_locked = leaf(1.0), leaf(1.0), {}
    for one, other in ((a, b), (b, a)):
        one.register_post_accumulate_grad_hook(
            lambda t, other=other: was_locked.update({id(t): PARAMETER_LOCKS.of([other])[0].locked()})
        )
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(a) * loss_of(b)])
    assert was_locked == {id(a): False, id(b): False}


def test_tensor_hooks_of_other_leaves_run_in_a_backward_inside_of_a_hook(cluster):
    a, b, seen = leaf(1.0), leaf(1.0), []
    b.register_hook(lambda grad: grad * 10)
    b.register_post_accumulate_grad_hook(lambda t: None)

    def go_backward_to_b(_):
        with torch.enable_grad():
            (b * 2).sum().backward()
        seen.append(b.grad.item())
        b.grad = None

    a.register_post_accumulate_grad_hook(go_backward_to_b)
    for loss in (lambda: loss_of(a) * loss_of(b), lambda: loss_of(a)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss()])
    assert seen == [20.0, 20.0]


def test_no_lock_is_held_while_another_one_is_waited_for():
    locks = ParameterLocks()
    first, second = found = locks.of([leaf(1.0), leaf(2.0)])
    for taken, other in ((first, second), (second, first)):
        is_in = threading.Event()

        def enter(is_in=is_in):
            with locks.held(found):
                is_in.set()

        with taken:
            thread = threading.Thread(target=enter)
            thread.start()
            for _ in range(100):  # at no time has it the other one for longer than a look
                assert other.acquire(timeout=LIMIT)
                other.release()
            assert not is_in.is_set()
        assert is_in.wait(LIMIT)
        thread.join()


OLDER_THAN_MPIRPC = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
from mpirpc._core.autograd_hooks import hook_test
other = torch.ones(1, requires_grad=True)
print([hook_test()((leaf * 1).grad_fn.next_functions[0][0]) for leaf in (*model.parameters(), other)])
"""


def test_ddp_that_is_older_than_mpirpc_is_known(tmp_path):
    command = [sys.executable, "-c", OLDER_THAN_MPIRPC, str(tmp_path / "store")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[True, True, False]\n", ran.stderr
