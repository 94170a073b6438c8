"""Derivatives of derivatives: exact if one worker computes the inner one, else refused (docs/training.md)."""

import pytest
import torch

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError
from mpirpc.testing import LoopbackCluster

WEIGHT = torch.tensor([1.5, -2.0, 3.0], dtype=torch.float64, requires_grad=True)


@pytest.fixture
def context_id():
    """An autograd context of worker 0, one of two."""
    with LoopbackCluster(2) as cluster, cluster.on(0), autograd.context() as context_id:
        yield context_id


def leaf():
    return torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64, requires_grad=True)


def critic(x):
    return (x * WEIGHT).sin().sum()


def penalized(x):
    """A score, and how far its slope is from 1: needs second derivatives."""
    score = critic(x)
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (slope.norm() - 1).square()


def there(function, x):
    return rpc.rpc_sync("worker1", function, args=(x,))


def gradient_of_weight(context_id):
    return autograd.get_gradients(context_id)[WEIGHT]


def assert_exact(context_id, x, function):
    """Both workers' gradients are those of ``function``, computed here."""
    expected = torch.autograd.grad(function(x), (x, WEIGHT))
    found = autograd.get_gradients(context_id)[x], there(gradient_of_weight, context_id)
    torch.testing.assert_close(found, expected)


def test_inner_derivative_inside_the_function_that_is_called(context_id):
    x = leaf()
    autograd.backward(context_id, [there(penalized, x * 2)])
    assert_exact(context_id, x, lambda x: penalized(x * 2))


def test_inner_derivative_by_a_received_tensor(context_id):
    """It needs the caller's part of the graph only; the outer pass then goes on at the callee."""

    def loss(score):
        (slope,) = torch.autograd.grad(score**3, score, create_graph=True)
        return slope**2 * score

    x = leaf()
    autograd.backward(context_id, [loss(there(critic, x))])
    assert_exact(context_id, x, lambda x: loss(critic(x)))


def test_local_backward_over_received_tensors_is_refused(context_id):
    x = leaf()
    loss = (there(critic, x) * x).sum()
    for differentiate in (loss.backward, lambda retain_graph: torch.autograd.backward([loss], None, True)):
        with pytest.raises(AutogradError, match="a local backward\\(\\) reached tensors") as caught:
            differentiate(retain_graph=True)
        assert "use mpirpc.autograd.backward(context_id, [loss])" in caught.value.hint
    autograd.backward(context_id, [loss])
    assert_exact(context_id, x, lambda x: (critic(x) * x).sum())


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_local_backward_with_create_graph_is_refused(context_id):
    score = there(critic, leaf())
    with pytest.raises(AutogradError, match="distributed autograd computes first derivatives only") as caught:
        (score * 2).backward(create_graph=True)
    assert "inside one function, on the worker that is called" in caught.value.hint


def test_derivative_by_what_was_sent_is_refused(context_id):
    """By torch, which sees no path in the graph of this worker."""
    x = leaf()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(there(critic, x), x, create_graph=True)


def test_received_tensors_are_constants_to_a_local_derivative(context_id):
    """As in torch: the path over the callee is not seen. The outer pass takes it all the same."""

    def loss(x, score):
        (slope,) = torch.autograd.grad((score * x.square()).sum(), x, create_graph=True)
        return (slope * x).sum()

    x = leaf()
    score = there(critic, x)
    autograd.backward(context_id, [loss(x, score)])
    assert_exact(context_id, x, lambda x: (2 * critic(x) * x.square()).sum())


def test_gradients_have_no_history(context_id):
    x = leaf()
    autograd.backward(context_id, [there(critic, x)])
    gradient = autograd.get_gradients(context_id)[x]
    assert not gradient.requires_grad
    assert not there(gradient_of_weight, context_id).requires_grad
    with pytest.raises(AutogradError, match="requires_grad not set on this root") as caught:
        autograd.backward(context_id, [gradient.square().sum()])
    assert "gradients from get_gradients have no history" in caught.value.hint
