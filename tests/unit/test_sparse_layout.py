"""Unit tests for mpirpc._core.sparse_layout: sparse tensors come back as they were, and stay in the graph."""

import pytest
import torch

import mpirpc as rpc
from mpirpc._core.sparse_layout import has_sparse, join, split
from mpirpc.errors import RemoteProtocolError
from mpirpc.testing import LoopbackCluster

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def sparse(values=(1.0, 2.0, 3.0), requires_grad=False, **options):
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor(values), (2, 3), check_invariants=True, **options)
    return tensor.requires_grad_(requires_grad)


def back(*tensors):
    parts = split(tensors)
    return join(parts, [part.requires_grad for part in parts])


@pytest.fixture
def cluster():
    with LoopbackCluster(2) as made, made.on(0):
        yield made


@pytest.mark.parametrize(
    "tensor",
    [
        sparse(),
        sparse().coalesce(),
        sparse((1, 2, 3)),
        sparse((1j, 2j, 3j)),
        torch.sparse_coo_tensor(
            torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (2, 3), check_invariants=True
        ),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (3, 4), check_invariants=True),
    ],
    ids=["plain", "coalesced", "int", "complex", "empty", "hybrid"],
)
def test_sparse_tensors_come_back(tensor):
    (copy,), _ = back(tensor)
    assert copy.layout is torch.sparse_coo
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    assert copy.is_coalesced() == tensor.is_coalesced()
    assert torch.equal(copy.to_dense(), tensor.to_dense())


def test_places_and_grad_flags_are_kept():
    dense, weight = torch.ones(2), torch.ones(1, requires_grad=True)
    tensors, needs_grad = back(dense, sparse(requires_grad=True), weight, sparse())
    assert [tensor.layout for tensor in tensors] == [torch.strided, torch.sparse_coo] * 2
    assert needs_grad == [False, True, True, False]


def test_dense_ones_only():
    assert not has_sparse([torch.ones(1), torch.ones(2)])
    assert has_sparse([torch.ones(1), sparse()])


@pytest.mark.parametrize("recipe", [[1], [1, 2, 2], [0, 0, 0, 0], [1, 2, 2, 3, 1, 1, 1]])
def test_parts_that_do_not_fit_are_refused(recipe):
    parts = [*split([sparse()])[:-1], torch.tensor(recipe)]
    with pytest.raises(RemoteProtocolError, match="do not fit"):
        join(parts, [False] * len(parts))


# --- over a group ---


def test_sparse_arguments_and_results(cluster):
    result = rpc.rpc_sync("worker1", torch.add, args=(sparse(), sparse()))
    assert torch.equal(result.to_dense(), sparse().to_dense() * 2)
    both = rpc.rpc_sync("worker1", list, args=([sparse(), {"it": torch.ones(2)}],))
    assert (both[0].layout, both[1]["it"].tolist()) == (torch.sparse_coo, [1, 1])


def test_gradients_reach_a_sparse_leaf(cluster):
    """The values used to be pickled apart from the graph: the gradient was lost without a word."""
    first, second = sparse(requires_grad=True), sparse(requires_grad=True)
    with rpc.autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.add, args=(first, second))
        rpc.autograd.backward(context_id, [torch.sparse.sum(result)])
        gradients = rpc.autograd.get_gradients(context_id)
    for leaf in (first, second):
        assert torch.equal(gradients[leaf].to_dense(), torch.tensor([[0.0, 0, 1], [1, 0, 1]]))
