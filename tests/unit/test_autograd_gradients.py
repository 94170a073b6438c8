"""Unit tests for mpirpc._core.autograd_gradients: gradients in bodies and in a context's dict."""

import pytest
import torch

from mpirpc._core.autograd_gradients import accumulate, decode_gradients, encode_gradients
from mpirpc._core.messages import Body
from mpirpc.errors import RemoteProtocolError


def coo(indices, values, shape):
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def sparse(coalesced):
    tensor = coo([[1, 1]], [[1.0, 2.0], [3.0, 4.0]], (3, 2))
    return tensor.coalesce() if coalesced else tensor


def leaf():
    return torch.zeros(3, 2, requires_grad=True)


# --- in bodies ---


def test_gradients_travel_with_gaps():
    a, b = torch.ones(2), torch.ones(3)
    body = encode_gradients([None, a, None, b])
    assert len(body.tensors) == 2
    assert decode_gradients(1, body) == [None, a, None, b]


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_travel_as_they_are(coalesced):
    body = encode_gradients([sparse(coalesced)])
    assert all(tensor.layout is torch.strided for tensor in body.tensors)
    [back] = decode_gradients(1, body)
    assert back.is_coalesced() == coalesced
    assert back.to_dense().tolist() == sparse(True).to_dense().tolist()


def test_strided_gradients_travel_contiguous():
    [tensor] = encode_gradients([torch.ones(1).expand(4)]).tensors
    assert tensor.is_contiguous()


def test_body_with_too_few_tensors_is_refused():
    body = encode_gradients([torch.ones(1), sparse(True)])
    with pytest.raises(RemoteProtocolError, match="rank 1 announces more tensors"):
        decode_gradients(1, Body(tensors=body.tensors[:2], flat=body.flat))


# --- in a context ---


def test_gradient_is_taken_without_a_copy():
    w, gradient, gradients = leaf(), torch.ones(3, 2), {}
    accumulate(gradients, [(w, gradient)], set())
    assert gradients[w] is gradient


def test_gradients_add_up_in_new_memory():
    w, first, gradients = leaf(), torch.ones(3, 2), {}
    accumulate(gradients, [(w, first)], set())
    accumulate(gradients, [(w, torch.ones(3, 2))], set())
    assert gradients[w].unique().tolist() == [2]
    assert first.unique().tolist() == [1]


@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True)])
def test_sparse_and_dense_gradients_add_up(kinds):
    w, gradients = leaf(), {}
    for is_sparse in kinds:
        accumulate(gradients, [(w, sparse(False) if is_sparse else sparse(False).to_dense())], set())
    total = gradients[w]
    assert (total.to_dense() if total.is_sparse else total)[1].tolist() == [8, 12]


def test_leaves_never_share_memory():
    """Backward of a + b hands the same tensor to both; scaling one in place must not scale the other."""
    w, v, gradient, gradients = leaf(), leaf(), torch.ones(3, 2), {}
    accumulate(gradients, [(w, gradient), (v, gradient)], set())
    assert len({gradient.data_ptr(), gradients[w].data_ptr(), gradients[v].data_ptr()}) == 3


def test_memory_taken_by_others_is_copied():
    w, v, gradient, gradients, taken = leaf(), leaf(), torch.ones(3, 2), {}, set()
    accumulate(gradients, [(w, gradient)], taken)
    accumulate(gradients, [(v, gradient)], taken)
    assert gradients[w].data_ptr() != gradients[v].data_ptr()


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(1).expand(3, 2),
        coo(torch.ones(1, 1).long().expand(1, 4), torch.ones(1, 2).expand(4, 2), (3, 2)),
    ],
)
def test_gradient_with_gaps_is_copied(gradient):
    w, gradients = leaf(), {}
    accumulate(gradients, [(w, gradient)], set())
    gradients[w].mul_(2)
    values = gradients[w]._values() if gradient.is_sparse else gradients[w]
    assert values.unique().tolist() == [2]


def test_gradient_laid_out_as_its_leaf_is_not_copied():
    w = torch.zeros(2, 3).t().requires_grad_()
    gradient, gradients = torch.ones(2, 3).t(), {}
    accumulate(gradients, [(w, gradient)], set())
    assert gradients[w] is gradient
