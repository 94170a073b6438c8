"""Unit tests for mpirpc._core.autograd_graph: components, reach, leaves, received tensors, runs."""

import pytest
import torch

from mpirpc._core.autograd_graph import connect, edge_of, explore, run
from mpirpc.errors import AutogradError


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64, requires_grad=True)


def receive(num=1):
    """``num`` received tensors and their node."""
    node, tensors = connect([torch.ones(2, dtype=torch.float64) for _ in range(num)])
    return node, *tensors


def explore_tensors(*sends, recvs=()):
    """Explore from sends that are tensors or lists of them; recv ids are 0, 1, ..."""
    edges = [[edge_of(t) for t in (send if isinstance(send, list) else [send])] for send in sends]
    return explore(edges, {node: number for number, node in enumerate(recvs)})


def sends_of(graph):
    return [component.sends for component in graph.components]


def leaves_of(graph):
    return [{id(edge.node.variable) for edge in edges} for edges in graph.leaves]


# --- components ---


def test_one_send_is_one_component_with_its_leaves_and_recvs():
    node, x = receive()
    w = leaf()
    graph = explore_tensors((x * w).sin(), recvs=[node])
    assert sends_of(graph) == [0b1]
    assert graph.components[0].recvs == (0,)
    assert graph.components[0].has_leaves
    assert leaves_of(graph) == [{id(w)}]
    assert graph.reach == {0: 0b1}


def test_sends_that_share_a_leaf_only_are_two_components():
    w = leaf()
    graph = explore_tensors(w * 2, w * 3)
    assert sends_of(graph) == [0b01, 0b10]
    assert leaves_of(graph) == [{id(w)}, {id(w)}]


def test_sends_that_meet_in_an_inner_node_are_one_component():
    h = leaf().sin()
    assert sends_of(explore_tensors(h * 2, leaf() * 3, h + 1)) == [0b101, 0b010]


def test_sends_joined_through_a_third_are_one_component():
    h, k = leaf().sin(), leaf().cos()
    assert sends_of(explore_tensors(h * 2, k * 2, h + k)) == [0b111]


def test_sends_that_meet_in_a_recv_are_one_component():
    """Its gradient is one message."""
    node, x = receive()
    assert sends_of(explore_tensors(x * 2, x * 3, recvs=[node])) == [0b11]


def test_tensors_of_one_send_are_one_component():
    assert sends_of(explore_tensors([leaf() * 2, leaf() * 3])) == [0b1]


def test_components_that_share_a_leaf_with_hooks_are_joined():
    w = leaf()
    w.register_hook(lambda g: g * g)
    assert sends_of(explore_tensors(w * 2, leaf() * 5, w * 3)) == [0b101, 0b010]


def test_sent_leaf_is_a_component_of_its_own():
    w = leaf()
    graph = explore_tensors(w, w * 2)
    assert sends_of(graph) == [0b01, 0b10]
    assert leaves_of(graph) == [{id(w)}, {id(w)}]


def test_component_without_leaves_says_so():
    node, x = receive()
    assert not explore_tensors(x * 2, recvs=[node]).components[0].has_leaves


# --- reach ---


def test_reach_of_recvs_in_a_shared_component():
    """Send 0 reaches recv 0, send 1 both."""
    node0, x = receive()
    node1, y = receive()
    h = x.sin()
    graph = explore_tensors(h * 2, h * y, recvs=[node0, node1])
    assert graph.reach == {0: 0b11, 1: 0b10}


def test_recv_that_no_send_reaches_has_no_entry():
    node0, x = receive()
    node1, _ = receive()
    assert explore_tensors(x * 2, recvs=[node0, node1]).reach == {0: 0b1}


def test_received_tensor_sent_on_reaches_its_recv():
    node, x, y = receive(2)
    graph = explore_tensors(x, [y, leaf()], recvs=[node])
    assert sends_of(graph) == [0b11]
    assert graph.reach == {0: 0b11}


def test_reach_agrees_with_paths_on_a_ladder():
    nodes, inputs = zip(*(receive() for _ in range(6)), strict=True)
    sends, h = [], torch.zeros(2, dtype=torch.float64)
    for x in inputs:
        h = h + x
        sends.append(h * 2)
    graph = explore_tensors(*sends, recvs=nodes)
    assert graph.reach == {i: sum(1 << j for j in range(i, 6)) for i in range(6)}


def test_deep_graph_needs_no_recursion():
    node, x = receive()
    h = x
    for _ in range(20_000):
        h = h + 1
    assert explore_tensors(h, h + 1, recvs=[node]).reach == {0: 0b11}


# --- edges ---


def test_edge_of_a_leaf_is_its_accumulator_in_any_grad_mode():
    w = leaf()
    with torch.no_grad():
        edge = edge_of(w)
    assert edge.node.variable is w
    assert edge.node is edge_of(w).node


def test_edge_stays_when_the_tensor_is_changed_in_place():
    w = leaf()
    h = w * 2
    edge = edge_of(h)
    h.mul_(10)
    assert run([edge], [torch.ones(2, dtype=torch.float64)], [edge_of(w)], False)[0].tolist() == [2, 2]


def test_edge_of_a_sparse_leaf():
    w = torch.eye(2).to_sparse().requires_grad_()
    assert edge_of(w).node.variable is w


def test_edge_keeps_a_python_function_alive():
    node, x = receive()
    edge = edge_of(x)
    del x
    assert explore([[edge]], {node: 7}).reach == {7: 0b1}
    assert run([edge], [torch.ones(2, dtype=torch.float64)], [edge], False)[0].tolist() == [1, 1]


# --- received tensors ---


def test_received_tensors_are_the_given_ones_and_no_leaves():
    given = [torch.ones(2), torch.ones(3)]
    node, (x, y) = connect(given)
    assert (x.data_ptr(), y.data_ptr()) == (given[0].data_ptr(), given[1].data_ptr())
    assert x.grad_fn is node
    assert y.grad_fn is node
    assert x.requires_grad
    assert not x.is_leaf


def test_received_tensors_can_be_changed_in_place():
    _, x, y = receive(2)
    x.mul_(2)
    y[0] = 5
    x += y
    assert x.tolist() == [7, 3]


def test_received_views_of_one_buffer_can_be_changed_in_place():
    """A change of one must not count as a change of the other, which is saved for backward."""
    buffer = torch.ones(4)
    _, (x, y) = connect([buffer[:2], buffer[2:]])
    product = (y * y).sum()
    x.mul_(2)
    product_edge, y_edge = edge_of(product), edge_of(y)
    assert run([product_edge], [torch.ones(())], [y_edge], False)[0].tolist() == [2, 2]


def test_received_under_no_grad_is_connected_all_the_same():
    with torch.no_grad():
        node, (x,) = connect([torch.ones(2)])
    assert x.grad_fn is node


def test_local_backward_into_received_tensors_is_refused():
    _, x = receive()
    with pytest.raises(AutogradError, match=r"local backward\(\) reached tensors that were received"):
        x.sum().backward()


def test_recv_node_has_torchs_name():
    node, _ = receive()
    assert node.name() == "torch::distributed::autograd::RecvRpcBackward"


# --- runs ---


def test_run_captures_gradients_and_leaves_grad_alone():
    _, x = receive()
    w = leaf(3.0, 4.0)
    found = run([edge_of(x * w)], [torch.ones(2, dtype=torch.float64)], [edge_of(w), edge_of(x)], False)
    assert [g.tolist() for g in found] == [[1, 1], [3, 4]]
    assert w.grad is None


def test_run_gives_none_for_what_it_does_not_reach():
    w, other = leaf(), leaf()
    assert run([edge_of(w * 2)], [torch.ones(2, dtype=torch.float64)], [edge_of(other)], False) == (None,)


def test_run_over_a_freed_graph_raises_torchs_error():
    w = leaf()
    edge, ones = edge_of(w * w), torch.ones(2, dtype=torch.float64)
    run([edge], [ones], [edge_of(w)], False)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run([edge], [ones], [edge_of(w)], False)


def test_run_keeps_sparse_gradients_sparse():
    table = torch.zeros(5, 2, requires_grad=True)
    out = torch.nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)
    [gradient] = run([edge_of(out)], [torch.ones(2, 2)], [edge_of(table)], False)
    assert gradient.is_sparse
