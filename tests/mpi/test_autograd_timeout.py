"""The time limit of ``backward`` over real ranks: a function that does not come back on another worker."""

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import RpcTimeoutError
from tests.mpi.test_autograd import GATE, PARAMETER, assert_works, leaf, open_gate, root, settle

__all__ = ["root"]  # the fixture

LIMIT = 0.1


class GateInBackward(torch.autograd.Function):
    """Twice its input; the backward pass waits for the gate."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        GATE.wait()
        return gradient * 2


def held_in_backward(x, workers):
    """Pass it on to the last of the workers, which uses the function that waits."""
    if workers:
        return rpc.rpc_sync(workers[0], held_in_backward, args=(x, workers[1:]))
    return GateInBackward.apply(x * PARAMETER)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("path", [(1,), (1, -1)], ids=["next worker", "last worker over the next"])
def test_a_function_that_hangs_elsewhere_costs_a_timeout(root, path):
    """The worker whose answer is missing is named; it may itself wait for another."""
    if root is None:
        return
    first, *rest = [root.names[rank] for rank in path]
    x = leaf()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(first, held_in_backward, args=(x, rest)).sum()
        with pytest.raises(RpcTimeoutError, match=r"no answer yet from 'worker1' \(rank 1\)\n"):
            autograd.backward(context_id, [loss], timeout=LIMIT)
        assert x not in autograd.get_gradients(context_id)
        assert_works_in(context_id)
    for worker in root.names[1:]:  # while the function still waits
        assert_works(worker)
    settle(root.size)
    rpc.rpc_sync(root.names[path[-1]], open_gate)
    settle(root.size, lambda infos: not any(info["autograd_passes"] for info in infos))
    assert_works(1)


def double(x):
    return x * 2


def assert_works_in(context_id):
    """A whole pass over worker 1 in a context that exists."""
    x = leaf()
    autograd.backward(context_id, [rpc.rpc_sync(1, double, args=(x,)).sum()])
    torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
