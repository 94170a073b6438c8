"""Distributed autograd over real ranks, case by case; ``test_autograd_fuzz`` has the random programs.

Rank 0 is the root; its callees are worker1 and the last worker (the same one at two ranks).
"""

import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError, RpcTimeoutError

PARAMETER = torch.tensor([1.5, -2.0, 3.0], requires_grad=True)
"""One per process."""

GATE = threading.Event()
"""Holds calls back until the test lets them go on."""

AT_GATE = threading.Semaphore(0)
"""Counts the calls that are there."""

SETTLE = 10.0
"""Seconds that workers may take to come to rest."""


@pytest.fixture
def root(rpc_world):
    """The world at rank 0; None elsewhere."""
    GATE.clear()
    yield rpc_world if rpc_world.rank == 0 else None
    GATE.set()


def leaf(*numbers):
    return torch.tensor(numbers or (0.5, 1.0, -1.0), requires_grad=True)


def gradients_at(worker, context_id):
    return rpc.rpc_sync(worker, gradient_of_parameter, args=(context_id,))


def assert_gradients(context_id, loss, *tensors):
    """The context's gradients of these leaves of rank 0 are those of ``loss``, a local computation."""
    found = autograd.get_gradients(context_id)
    for tensor, wanted in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
        torch.testing.assert_close(found[tensor], wanted)
        assert tensor.grad is None


def assert_works(worker):
    """A whole pass over ``worker``."""
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(worker, scale, args=(x,)).sum()])
        assert_gradients(context_id, (x * PARAMETER).sum(), x)


def settle(size, is_done=lambda infos: not any(info["autograd_contexts"] for info in infos)):
    """Look at all workers until no contexts are left."""
    deadline = time.monotonic() + SETTLE
    while not is_done(infos := [rpc.rpc_sync(rank, rpc.debug_info) for rank in range(size)]):
        assert time.monotonic() < deadline, f"contexts by rank: {[i['autograd_contexts'] for i in infos]}"


# --- called by RPC ---


def gradient_of_parameter(context_id):
    return autograd.get_gradients(context_id).get(PARAMETER)


def scale(x):
    return x * PARAMETER


def scale_then(x, workers):
    """Scale, and pass it on to the first of the workers with the rest of them; scale what comes back."""
    y = x * PARAMETER
    return rpc.rpc_sync(workers[0], scale_then, args=(y, workers[1:])) * PARAMETER if workers else y


def two_values(x):
    return x * PARAMETER, x.sin()


def take(x, unused):
    return x * 2


def get_parameter():
    return PARAMETER


def add_fetched(rref, x):
    return rref.to_here() * x


@rpc.functions.async_execution
def scale_later(x, worker):
    return rpc.rpc_async(worker, scale, args=(x,)).then(lambda done: done.wait() * PARAMETER)


def double_in_place(x):
    x.mul_(2)
    x[1:].add_(1)
    return x * x


def sum_checkpointed(x):
    return checkpoint(lambda y: (y.sin() * PARAMETER).sum(), x, use_reentrant=False)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("bad function")


def with_bad_hook(x):
    y = x * 2

    def fail(gradient):
        raise ValueError("bad hook")

    y.register_hook(fail)
    return y


def with_bad_function(x):
    return Bad.apply(x)


def with_bad_function_there(x, worker):
    return rpc.rpc_sync(worker, with_bad_function, args=(x,))


def wait_for_gate(x):
    AT_GATE.release()
    GATE.wait()
    return x * 2


def wait_until_at_gate(num_calls):
    for _ in range(num_calls):
        AT_GATE.acquire()


def open_gate():
    GATE.set()


def pass_on_after_gate(x, worker):
    wait_for_gate(x)
    return rpc.rpc_sync(worker, scale, args=(x,))


def fetch_after_gate(rref):
    wait_for_gate(0)
    return rref.to_here()


def hook_waits_for_gate(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient if GATE.wait() else None)
    return y


def train(worker, factor):
    """A context of its own, started here."""
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [(rpc.rpc_sync(worker, scale, args=(x,)) * factor).sum()])
        theirs = gradients_at(worker, context_id)
        mine = autograd.get_gradients(context_id)[x]
    return mine / factor, theirs / factor


def backward_here(context_id, x):
    autograd.backward(context_id, [x.sum()])


# --- shapes of programs ---


@pytest.mark.mpi(min_size=2)
def test_one_hop(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, scale, args=(x,)).sum()
            autograd.backward(context_id, [loss])
            assert_gradients(context_id, (x * PARAMETER).sum(), x)
            torch.testing.assert_close(gradients_at(1, context_id), x.detach())
        assert x.grad is None
        assert rpc.rpc_sync(1, get_parameter).grad is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "path", [(1, -1), (1, 0, 1), (1, -1, 1, -1), (0, 0), (1, 0, 1, 0, -1, 0, 1, 0)], ids=str
)
def test_nested_calls(root, path):
    """Two hops, back to the root's worker, ping-pong, calls to oneself."""
    if root:
        first, *rest = [root.names[rank] for rank in path]
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(first, scale_then, args=(x, rest)).sum()
            autograd.backward(context_id, [loss])
            power = 2 * len(path) - 1
            assert_gradients(context_id, (x * PARAMETER.detach() ** power).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_ping_pong_over_a_kept_value(root):
    """Each hop goes on from values of both sides: gradients cross one pair of workers both ways."""
    if root:
        x = leaf()
        with autograd.context() as context_id:
            value = local = x
            for _ in range(5):
                value = rpc.rpc_sync(1, scale, args=(value,)) + value * x
                local = local * PARAMETER + local * x
            autograd.backward(context_id, [value.sum()])
            assert_gradients(context_id, local.sum(), x)


@pytest.mark.mpi(min_size=3)
def test_diamond_over_three_workers(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            source = x.exp()
            futures = [rpc.rpc_async(worker, scale_then, args=(source, [2])) for worker in (1, 2)]
            left, right = [future.wait() for future in futures]
            autograd.backward(context_id, [(left * right).sum()])
            local = (x.exp() * PARAMETER.detach() ** 3) ** 2
            assert_gradients(context_id, local.sum(), x)


@pytest.mark.mpi(min_size=2)
def test_unused_values_get_no_gradient_and_stop_nothing(root):
    if root:
        x, y = leaf(), leaf(1.0, 2.0, 3.0)
        with autograd.context() as context_id:
            used, _ = rpc.rpc_sync(1, two_values, args=(x,))
            used = used + rpc.rpc_sync(-1 % root.size, take, args=(x, y * 2))
            rpc.rpc_sync(1, scale, args=(y,))
            rpc.remote(1, scale, args=(y,)).to_here()
            autograd.backward(context_id, [used.sum()])
            assert_gradients(context_id, (x * PARAMETER + x * 2).sum(), x)
            assert y not in autograd.get_gradients(context_id)


@pytest.mark.mpi(min_size=2)
def test_to_here_of_a_tensor_with_history(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            rref = rpc.remote(1, scale, args=(x,))
            mine = rpc.RRef(x * 3)
            value = rref.to_here() * rref.to_here() + rpc.rpc_sync(1, add_fetched, args=(rref, x))
            value = value + rpc.rpc_sync(root.size - 1, add_fetched, args=(mine, x))
            autograd.backward(context_id, [value.sum()])
            y = x * PARAMETER
            assert_gradients(context_id, (y * y + y * x + x * 3 * x).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_parameter_fetched_from_its_owner(root):
    if root:
        with autograd.context() as context_id:
            fetched = rpc.remote(1, get_parameter).to_here()
            autograd.backward(context_id, [(fetched * 3).sum()])
            torch.testing.assert_close(gradients_at(1, context_id), torch.full((3,), 3.0))


@pytest.mark.mpi(min_size=2)
def test_backward_from_an_rref(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            rref = rpc.remote(1, torch.sum, args=(x * 2,))
            rref.backward(context_id)
            assert_gradients(context_id, (x * 2).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_async_execution(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, scale_later, args=(x, root.names[-1])).sum()
            autograd.backward(context_id, [loss])
            assert_gradients(context_id, (x * PARAMETER**2).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_change_in_place_of_a_received_tensor(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, double_in_place, args=(x,)).sum()
            autograd.backward(context_id, [loss])
            assert_gradients(context_id, double_in_place(x.clone()).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_change_in_place_after_sending(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            sent = x * 1.0
            there = rpc.rpc_sync(1, scale, args=(sent,))
            sent.mul_(4)
            autograd.backward(context_id, [(there + sent).sum()])
            assert_gradients(context_id, (x * PARAMETER + x * 4).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_change_in_place_of_one_of_two_received_views(root):
    """It would reach the other view's values and not its gradient: refused, not silently wrong."""
    if root is None:
        return
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    with autograd.context():
        base = x * 1
        with pytest.raises(RuntimeError, match="modified inplace"):
            rpc.rpc_sync(1, double_first, args=(base, base.t()))


def double_first(a, b):
    a.mul_(2)
    return b * 3


@pytest.mark.mpi(min_size=2)
def test_checkpoint_in_a_callee(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync(1, sum_checkpointed, args=(x,))])
            assert_gradients(context_id, (x.sin() * PARAMETER).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_no_grad_records_nothing(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            with torch.no_grad():
                value = rpc.rpc_sync(1, take, args=(x, None))
            autograd.backward(context_id, [(value * x).sum()])
            assert_gradients(context_id, (x * 2).detach().mul(x).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_several_roots_and_repeated_passes(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            value = rpc.rpc_sync(1, scale, args=(x,))
            autograd.backward(context_id, [value.sum(), (value * x).sum()], retain_graph=True)
            autograd.backward(context_id, [value.sum()])
            y = x * PARAMETER
            assert_gradients(context_id, (y * 2 + y * x).sum(), x)
            with pytest.raises((RuntimeError, AutogradError), match="second time"):
                autograd.backward(context_id, [value.sum()])
        assert_works(1)


# --- failure ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("function", [with_bad_hook, with_bad_function])
def test_failure_in_backward_on_a_worker_is_raised_at_the_root(root, function):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, function, args=(x,)).sum()
            with pytest.raises(AutogradError, match="bad") as caught:
                autograd.backward(context_id, [loss])
        assert "'worker1' (rank 1)" in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
        assert_works(1)
        settle(root.size)


@pytest.mark.mpi(min_size=3)
def test_failure_two_hops_away_names_the_worker(root):
    if root:
        last = root.names[-1]
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, with_bad_function_there, args=(leaf(), last)).sum()
            with pytest.raises(AutogradError, match=rf"'{last}' \(rank {root.size - 1}\)"):
                autograd.backward(context_id, [loss])
            # the context itself lives on
            x = leaf()
            autograd.backward(context_id, [rpc.rpc_sync(1, scale, args=(x,)).sum()])
            assert_gradients(context_id, (x * PARAMETER).sum(), x)
        settle(root.size)


@pytest.mark.mpi(min_size=2)
def test_failure_at_the_root_is_raised_as_it_is(root):
    if root:
        with autograd.context() as context_id:
            loss = with_bad_hook(rpc.rpc_sync(1, scale, args=(leaf(),))).sum()
            with pytest.raises(ValueError, match="bad hook"):
                autograd.backward(context_id, [loss])
        assert_works(1)
        settle(root.size)


@pytest.mark.mpi(min_size=2)
def test_leaving_a_context_with_calls_in_flight(root):
    """What the callee does after the end, further calls included, is done without recording."""
    if root:
        last = root.size - 1
        kept = rpc.remote(last, get_parameter)
        with autograd.context():
            waiting = rpc.rpc_async(1, wait_for_gate, args=(leaf(),))
            passing = rpc.rpc_async(1, pass_on_after_gate, args=(leaf(), last))
            fetching = rpc.rpc_async(1, fetch_after_gate, args=(kept,))
            rpc.rpc_sync(1, wait_until_at_gate, args=(3,))
        settle(root.size)
        rpc.rpc_sync(1, open_gate)
        assert torch.equal(waiting.wait(), leaf() * 2)
        assert torch.equal(passing.wait(), leaf() * PARAMETER)
        assert torch.equal(fetching.wait(), PARAMETER)
        settle(root.size)
        assert_works(1)


@pytest.mark.mpi(min_size=2)
def test_leaving_a_context_during_its_backward_pass(root):
    if root:
        failures = []

        def run(context_id, loss):
            try:
                autograd.backward(context_id, [loss])
            except AutogradError as error:
                failures.append(str(error))

        with autograd.context() as context_id:
            loss = rpc.rpc_sync(1, hook_waits_for_gate, args=(leaf(),)).sum()
            thread = threading.Thread(target=run, args=(context_id, loss))
            thread.start()
            settle(1, lambda infos: infos[0]["autograd_passes"])
        thread.join()
        assert len(failures) == 1
        assert "released during backward pass" in failures[0]
        rpc.rpc_sync(1, open_gate)
        settle(root.size)
        assert_works(1)


@pytest.mark.mpi(min_size=2)
def test_a_call_that_timed_out_counts_as_unused(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            with pytest.raises(RpcTimeoutError):
                rpc.rpc_sync(1, wait_for_gate, args=(x * 2,), timeout=0.05)
            rpc.rpc_sync(1, open_gate)
            autograd.backward(context_id, [rpc.rpc_sync(1, scale, args=(x,)).sum()])
            assert_gradients(context_id, (x * PARAMETER).sum(), x)
