"""Distributed autograd over real ranks: misuse, and several contexts at once."""

import contextlib
import threading

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError
from tests.mpi.test_autograd import (
    PARAMETER,
    assert_gradients,
    assert_works,
    backward_here,
    leaf,
    root,
    scale,
    scale_then,
    settle,
    train,
)

__all__ = ["root"]  # the fixture


@pytest.mark.mpi(min_size=2)
def test_wrong_roots(root):
    if root:
        x = leaf()
        with autograd.context() as context_id:
            value = rpc.rpc_sync(1, scale, args=(x,))
            for roots, text in [
                ([], "No tensors provided"),
                ([value], "not a scalar"),
                ([value.sum().detach()], "requires_grad not set"),
                ([torch.ones((), requires_grad=True)], "does not have a valid gradient function"),
                ([value.sum(), value], r"roots\[1\]"),
            ]:
                with pytest.raises(AutogradError, match=text):
                    autograd.backward(context_id, roots)
            for roots in (value.sum(), [1.0], None):
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    autograd.backward(context_id, roots)
            autograd.backward(context_id, [value.sum()])
            assert_gradients(context_id, (x * PARAMETER).sum(), x)


@pytest.mark.mpi(min_size=2)
def test_unknown_contexts(root):
    if root:
        loss = (leaf() * 2).sum()
        with autograd.context() as over:
            pass
        for context_id in (over, 12345, -1):
            with pytest.raises(AutogradError, match=f"Could not find autograd context with id: {context_id}"):
                autograd.backward(context_id, [loss])
            with pytest.raises(AutogradError, match="Could not find autograd context"):
                autograd.get_gradients(context_id)
            with pytest.raises(AutogradError, match="Could not find autograd context"):
                rpc.rpc_sync(1, backward_here, args=(context_id, leaf()))
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.backward("1", [loss])


@pytest.mark.mpi(min_size=2)
def test_contexts_do_not_nest(root):
    if root:
        with autograd.context():
            for _ in range(2):  # the refused one does not end the first one
                with pytest.raises(AutogradError, match="Already have an"), autograd.context():
                    pytest.fail("entered")
        with autograd.context():
            pass


# --- several contexts ---


@pytest.mark.mpi(min_size=2)
def test_contexts_from_several_threads_and_ranks_at_once(root):
    """All over the same parameters, none gets anything of another."""
    if root:
        results = {}

        def run(factor):
            results[factor] = train(root.names[1], factor)

        threads = [threading.Thread(target=run, args=(float(factor),)) for factor in range(1, 9)]
        for thread in threads:
            thread.start()
        others = [rpc.rpc_async(rank, train, args=(root.names[1], 100.0)) for rank in range(1, root.size)]
        for thread in threads:
            thread.join()
        assert sorted(results) == [float(factor) for factor in range(1, 9)]
        for mine, theirs in [*results.values(), *[future.wait() for future in others]]:
            torch.testing.assert_close(mine, PARAMETER.detach())
            torch.testing.assert_close(theirs, leaf().detach())
        settle(root.size)


@pytest.mark.mpi(min_size=2)
def test_error_inside_a_context_frees_it(root):
    if root:
        with contextlib.suppress(KeyError), autograd.context():
            rpc.rpc_sync(1, scale_then, args=(leaf(), [root.names[-1]]))
            raise KeyError
        settle(root.size)
        assert_works(1)
