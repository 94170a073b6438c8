"""What one worker knows about distributed autograd contexts: records, no behaviour beyond keeping them.

Rules for this file: nothing here locks or sends; the engine does. User objects (tensors, graph) hang on these
records, so whoever takes one out of a table lets go of it after giving back the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

COUNTER_BITS = 48
"""Ids of contexts and autograd messages are ``rank << 48 | counter``: unique over workers."""

MAX_TOMBSTONES = 1 << 14
"""Released contexts remembered, so that late messages do not bring them back."""


@dataclass(frozen=True, slots=True)
class SendRecord:
    """Tensors requiring grad that one message took away: the send function of the pair."""

    dest: int
    edges: tuple[GradientEdge, ...]
    devices: tuple[torch.device, ...]

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """Where it leads, in the form of torch's graph nodes."""
        return tuple((edge.node, edge.output_nr) for edge in self.edges)

    def name(self) -> str:
        """What torch calls it."""
        return "torch::distributed::autograd::SendRpcBackward"


@dataclass(frozen=True, slots=True)
class RecvRecord:
    """Tensors requiring grad that one message brought."""

    source: int
    node: Node
    """The recv function that made them."""
    edges: tuple[GradientEdge | None, ...]
    """One per tensor of the message that requires grad; None if it is the same object as a later one."""


class AutogradContext:
    """One context at one worker. All attributes but ``gradients`` change under the engine's lock.

    Attributes:
        context_id: Its name, the same at all workers.
        sends: autograd_message_id -> send; ``attach_send`` puts in, ``cancel_send`` takes out.
        recvs: autograd_message_id -> recv; ``attach_recv`` puts in.
        dests: Workers that got a request or tensors of this context from here; they must be told of its end.
        sources: Workers that requests or tensors came from.
        gradients: Leaf -> gradient, under ``gradients_lock``; runs of backward passes put in.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.sends: dict[int, SendRecord] = {}
        self.recvs: dict[int, RecvRecord] = {}
        self.dests: set[int] = set()
        self.sources: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.gradients_lock = threading.Lock()  # held over tensor additions; no other lock is taken inside

    @property
    def known_workers(self) -> set[int]:
        """All workers that this one exchanged something of the context with."""
        return self.dests | self.sources

    def __repr__(self) -> str:
        return f"<AutogradContext {self.context_id} sends={len(self.sends)} recvs={len(self.recvs)}>"


class Tombstones:
    """Ids of released contexts: the last ``MAX_TOMBSTONES`` of them."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, None] = OrderedDict()

    def add(self, context_id: int) -> None:
        """Remember that this context is over."""
        self._ids[context_id] = None
        if len(self._ids) > MAX_TOMBSTONES:
            self._ids.popitem(last=False)

    def __contains__(self, context_id: int) -> bool:
        return context_id in self._ids
