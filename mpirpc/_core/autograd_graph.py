r"""The local part of a backward pass: what the recorded graph connects, and runs of torch's engine over it.

The graph from the sends down::

    send 1     send 2      edges of the tensors sent, kept as GradientEdge
       \       /    \
       inner nodes    ...      two sends that meet in one are in one component
        /      \
     recv     leaf         recv: function that made received tensors; leaf: AccumulateGrad of a parameter

Components share leaves only, and a leaf just sums, so each is treated by itself; unless the leaf has tensor
hooks, which must see the sum: such components are joined. The *reach* of a recv is the set of sends that it
can be reached from.

Rules for this file: torch only; no user code runs except in :func:`run`; each node is visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from mpirpc._core.autograd_hooks import hook_test, leaf_of
from mpirpc._core.autograd_protocol import Component
from mpirpc.errors import AutogradError

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_ANCHOR = torch.empty(0, requires_grad=True)
"""Input of every recv function, so that its outputs require grad; never gets a gradient itself."""


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """What the graph below the sends looks like; bit i stands for the i-th send given to :func:`explore`."""

    components: tuple[Component, ...]
    leaves: tuple[tuple[GradientEdge, ...], ...]
    """Per component."""
    reach: dict[int, int]
    """Recv id -> bit set of sends; recvs that no send reaches have no entry."""
    hooked: frozenset[Node]
    """Leaves with hooks that run when a gradient is accumulated."""


# --- recording ---


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where gradients of ``tensor`` enter the graph; keeps that part of the graph alive.

    The edge stays what it is when the tensor is changed in place later.
    """
    node = tensor.grad_fn
    if node is not None and not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)
    # A node put on top knows a leaf's accumulator, and keeps a node written in Python alive: a reference does
    # not.
    if torch.is_grad_enabled():
        return _edge_below(tensor)
    with torch.enable_grad():
        return _edge_below(tensor)


def _edge_below(tensor: torch.Tensor) -> GradientEdge:
    """The edge that a function of ``tensor`` has. Copies: a sparse tensor's values, it has no views."""
    function = tensor.view_as(tensor) if tensor.layout is torch.strided else torch.neg(tensor)
    top = function.grad_fn
    assert top is not None
    node, output_nr = top.next_functions[0]
    assert node is not None
    return GradientEdge(node, output_nr, top)


class _Receive(torch.autograd.Function):
    """The recv function: its outputs are the received tensors themselves. Copies: none."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the tensors as they are."""
        return tensors

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        """Refuse: a pass of ours stops before this node, so this is a plain local ``backward``."""
        if torch.is_grad_enabled():  # torch's mark of create_graph=True
            raise AutogradError(
                "a local backward pass with create_graph=True reached tensors that were received by RPC: "
                "distributed autograd computes first derivatives only",
                hint="compute the inner derivative inside one function, on the worker that is called, and "
                "return what depends on it; then use mpirpc.autograd.backward",
            )
        raise AutogradError(
            "a local backward() reached tensors that were received by RPC",
            hint="use mpirpc.autograd.backward(context_id, [loss]), it goes on at the worker they came from",
        )


def _recv_name(_node: Any) -> str:
    """What torch calls its recv function; programs that print or walk graphs look for it."""
    return "torch::distributed::autograd::RecvRpcBackward"


_Receive._backward_cls.name = _recv_name  # type: ignore[attr-defined]
_Apply = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
_apply_anywhere: _Apply = _Receive.apply
_apply_here: _Apply = super(torch.autograd.Function, _Receive).apply
"""What the one above calls where no transform of ``torch.func`` is active: 12 us instead of 26."""

_AccumulateGrad: type = vars(torch._C._functions)["AccumulateGrad"]  # missing in torch's stubs


def connect(tensors: Sequence[torch.Tensor]) -> tuple[Node, list[torch.Tensor]]:
    """Make received tensors the outputs of one recv function.

    Tensors that share memory with another one are given as views: each has a history of its own, so an
    in-place change of one would change the values of the others and not their gradients; torch refuses it for
    views that a function returns. A view that is alone gets a version counter of its own: it can be changed.

    Returns:
        The function's node and the tensors to be used from now on.

    Copies: none.
    """
    apply = _apply_anywhere if torch._C._are_functorch_transforms_active() else _apply_here
    if torch.is_grad_enabled():
        outputs = apply(_ANCHOR, _apart(tensors))
    else:
        with torch.enable_grad():
            outputs = apply(_ANCHOR, _apart(tensors))
    node = outputs[0].grad_fn
    assert node is not None
    return node, list(outputs)


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors that may be changed in place, and views of those that may not."""
    overlapping = _overlapping(tensors) if len(tensors) > 1 else frozenset()
    return tuple(
        t.view_as(t) if place in overlapping else t.data if t._is_view() else t
        for place, t in enumerate(tensors)
    )


def _overlapping(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the places of the tensors that share memory with another one."""
    spans = []
    for place, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), place))
    spans.sort()
    found: set[int] = set()
    reach, reached_by = 0, -1
    for start, end, place in spans:
        if start < reach:
            found |= {place, reached_by}
        if end > reach:
            reach, reached_by = end, place
    return frozenset(found)


def call_joined_to_graph(call: Call) -> Call:
    """Return what to send of a call inside an autograd context; see :func:`joined_to_graph`."""
    func, args, kwargs = call
    return func, joined_to_graph(args), {name: joined_to_graph(x) for name, x in kwargs.items()}


def joined_to_graph(value: Any) -> Any:
    """Return what to send of ``value`` inside an autograd context.

    A Parameter is pickled as a new leaf, which would cut the graph. As an argument or result, or directly in
    a tuple or list of them, it is sent as the tensor it is; a module that is sent keeps its Parameters.
    """
    kind = type(value)
    if kind is torch.nn.Parameter:
        return value.as_subclass(torch.Tensor)
    if kind in (tuple, list) and any(type(item) is torch.nn.Parameter for item in value):
        return kind(map(joined_to_graph, value))
    return value


# --- exploring ---


class _Groups:
    """Union-find over positions; the lowest position names its group."""

    def __init__(self, size: int) -> None:
        self._parents = list(range(size))

    def find(self, position: int) -> int:
        """Name of the group that ``position`` is in."""
        parents = self._parents
        while parents[position] != position:
            parents[position] = position = parents[parents[position]]
        return position

    def join(self, first: int, second: int) -> None:
        """Make the groups of both one."""
        first, second = self.find(first), self.find(second)
        self._parents[max(first, second)] = min(first, second)


class _Walk:
    """One walk over everything below the sends."""

    def __init__(self, sends: Sequence[Sequence[GradientEdge]], recv_ids: Mapping[Node, int]) -> None:
        self.sends = sends
        self.recv_ids = recv_ids
        self.groups = _Groups(len(sends))
        self.first: dict[Node, int] = {}  # inner node -> position of the send that met it first
        self.children: dict[Node, list[Node]] = {}  # of inner nodes; none of a recv's
        self.leaves: list[dict[Node, None]] = [{} for _ in sends]  # per send: leaves it met, in order
        self.first_of_leaf: dict[Node, int] = {}
        self.recvs: dict[Node, int] = {}  # recv nodes met -> position
        for position, edges in enumerate(sends):
            self._descend(position, [edge.node for edge in edges])

    def _descend(self, position: int, stack: list[Node]) -> None:
        """Visit what only this send has met so far; join the groups of sends that met the rest before."""
        while stack:
            node = stack.pop()
            met_by = self.first.get(node)
            if met_by is not None:
                if met_by != position:
                    self.groups.join(met_by, position)
            elif isinstance(node, _AccumulateGrad):
                self._meet_leaf(position, node)
            else:
                self.first[node] = position
                if node in self.recv_ids:
                    self.recvs[node] = position
                    self.children[node] = []
                else:
                    children = [child for child, _ in node.next_functions if child is not None]
                    self.children[node] = children
                    stack.extend(children)

    def _meet_leaf(self, position: int, node: Node) -> None:
        self.leaves[position][node] = None
        met_by = self.first_of_leaf.setdefault(node, position)
        if met_by != position and node.variable._backward_hooks:  # type: ignore[attr-defined]
            self.groups.join(met_by, position)

    def members(self) -> dict[int, list[int]]:
        """Group -> positions of its sends."""
        members: dict[int, list[int]] = {}
        for position in range(len(self.sends)):
            members.setdefault(self.groups.find(position), []).append(position)
        return members

    def reach(self, members: Mapping[int, Sequence[int]]) -> dict[Node, int]:
        """Recv node -> sends that reach it."""
        shared = {group for group, positions in members.items() if len(positions) > 1}
        reach = {node: 1 << position for node, position in self.recvs.items()}
        unsure = [node for node, position in self.recvs.items() if self.groups.find(position) in shared]
        if unsure:
            bits = self._spread(shared)
            reach.update((node, bits[node]) for node in unsure)
        return reach

    def _spread(self, shared: set[int]) -> dict[Node, int]:
        """Hand each send's bit down through the groups given, parents before children."""
        find, children = self.groups.find, self.children
        nodes = [node for node, position in self.first.items() if find(position) in shared]
        num_parents = dict.fromkeys(nodes, 0)
        for node in nodes:
            for child in children[node]:
                if child in num_parents:
                    num_parents[child] += 1
        bits = dict.fromkeys(nodes, 0)
        for position, edges in enumerate(self.sends):
            for edge in edges:
                if edge.node in bits:
                    bits[edge.node] |= 1 << position
        ready = [node for node in nodes if not num_parents[node]]
        while ready:
            node = ready.pop()
            for child in children[node]:
                if child in num_parents:
                    bits[child] |= bits[node]
                    num_parents[child] -= 1
                    if not num_parents[child]:
                        ready.append(child)
        return bits


def explore(sends: Sequence[Sequence[GradientEdge]], recv_ids: Mapping[Node, int]) -> LocalGraph:
    """Find the components of the graph below ``sends``, and what reaches which recv.

    Args:
        sends: Edges of each send's tensors; the position is the bit.
        recv_ids: Node of each recv function -> its id.

    Thread: any; the graph must not be changed meanwhile (torch never does).   Progress: never blocks.
    """
    walk = _Walk(sends, recv_ids)
    hooked = frozenset(filter(hook_test(), walk.first_of_leaf))
    if len(sends) == 1:
        ids = tuple([recv_ids[node] for node in walk.recvs])
        edges = tuple([GradientEdge(node, 0) for node in walk.leaves[0]])
        return LocalGraph((Component(1, ids, bool(edges)),), (edges,), dict.fromkeys(ids, 1), hooked)
    members = walk.members()
    reach = walk.reach(members)
    recvs: dict[int, list[int]] = {group: [] for group in members}
    for node, position in walk.recvs.items():
        recvs[walk.groups.find(position)].append(recv_ids[node])
    components, leaves = [], []
    for group, positions in members.items():
        nodes = {node: None for position in positions for node in walk.leaves[position]}
        leaves.append(tuple(GradientEdge(node, 0) for node in nodes))
        bits = sum(1 << position for position in positions)
        components.append(Component(bits, tuple(recvs[group]), bool(nodes)))
    return LocalGraph(
        tuple(components), tuple(leaves), {recv_ids[node]: bits for node, bits in reach.items()}, hooked
    )


# --- running ---


def run(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[GradientEdge],
    retain_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """Let torch's engine carry ``gradients`` from ``outputs`` to ``inputs``; nothing is written to ``.grad``.

    User code (hooks, custom functions) runs here, on this thread for CPU tensors.

    This is ``torch.autograd.grad(outputs, inputs, gradients, retain_graph=..., allow_unused=True)`` without
    its Python part, which costs more than the run of a small graph (75 against 31 us); the engine repeats its
    checks.

    Raises:
        RuntimeError: The graph was freed by an earlier pass; also whatever user code raises.
    """
    if all(isinstance(edge.node, _AccumulateGrad) for edge in outputs):
        found = _pass_on(outputs, gradients, inputs)
        if found is not None:
            return found
    return _engine_run_backward(
        tuple(outputs), tuple(gradients), retain_graph, False, tuple(inputs), True, accumulate_grad=False
    )


def _pass_on(
    outputs: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[GradientEdge]
) -> Sequence[torch.Tensor | None] | None:
    """What a run from leaves to leaves finds; None if it must be run, because of hooks."""
    found: dict[Node, torch.Tensor] = {}
    for edge, gradient in zip(outputs, gradients, strict=True):
        leaf = leaf_of(edge)
        if leaf._backward_hooks or leaf.shape != gradient.shape or edge.node in found:
            return None
        found[edge.node] = gradient
    return [found.get(edge.node) for edge in inputs]
