"""What the messages of calls carry beside values: RRef handles, and tensors that need gradients.

Both sides of a call use it: who sends attaches, who receives opens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.messages import Body, CallResponse, ForkDescriptor
from mpirpc._core.pickling import RRefHook, load_flat, loads
from mpirpc._core.rref_store import RRefStore
from mpirpc._core.wire import Incoming, ShortIncoming


class Contents:
    """Gets RRefs and gradients in and out of one worker's messages.

    Args:
        store: RRef values and handles.
        autograd: Contexts, send and recv functions.
        hook: How RRefs get into messages.
        make_rref: Makes a handle object for a fork that was adopted.
    """

    def __init__(
        self,
        store: RRefStore,
        autograd: AutogradEngine,
        hook: RRefHook,
        make_rref: Callable[[ForkDescriptor], Any],
    ) -> None:
        self.autograd = autograd
        self.hook = hook
        self.store = store
        self._make_rref = make_rref

    def attach(self, context_id: int, dest: int, body: Body) -> int:
        """Join the tensors of a message that leaves to the context; return its ``autograd_message_id``."""
        self.autograd.note_request(context_id, dest)
        return self.autograd.attach_send(context_id, dest, body.tensors) if body.tensors else 0

    def take_back(self, context_id: int, message_id: int, body: Body) -> None:
        """Undo what was prepared for a message that was not sent."""
        for fork in body.forks:
            self.hook.cancel(fork)
        if message_id:
            self.autograd.cancel_send(context_id, message_id)

    def open_response(self, source: int, incoming: Incoming) -> Any:
        """Rebuild the result that a response carries; see :meth:`open`."""
        if type(incoming) is ShortIncoming and not incoming.described:
            try:
                return incoming.flat[1][0]  # a result is one value
            except (LookupError, TypeError):
                return load_flat(incoming.flat)  # raises
        response = incoming.message
        assert isinstance(response, CallResponse)
        return self.open(source, incoming, response.context_id, response.autograd_message_id)

    def open(self, source: int, incoming: Incoming, context_id: int, message_id: int) -> Any:
        """Rebuild what a message carries: handles first (they must be released even if unpickling fails)."""
        if type(incoming) is ShortIncoming and not incoming.described:
            return load_flat(incoming.flat)
        if torch.is_inference_mode_enabled():  # this thread's mode is not that of who will use the tensors
            with torch.inference_mode(False):
                return self.open(source, incoming, context_id, message_id)
        rrefs = [self._adopt(fork) for fork in incoming.forks()]
        body, needs_grad = incoming.body()
        tensors = body.tensors
        if message_id and context_id:
            tensors = self.autograd.attach_recv(context_id, source, message_id, tensors, needs_grad)
        elif True in needs_grad:
            for tensor, needs in zip(tensors, needs_grad, strict=True):
                tensor.requires_grad_(needs)
        return loads(body, tensors, rrefs)

    def _adopt(self, fork: ForkDescriptor) -> Any:
        self.store.adopt(fork)
        return self._make_rref(fork)

    def release_late(self, source: int, incoming: Incoming) -> None:
        """Take a response that nobody waits for. Thread: the one that polled.

        The handles in it are let go, and its tensors join the context, so that a backward pass can answer for
        them.
        """
        for fork in incoming.forks():
            self._adopt(fork)
        response = incoming.message
        if isinstance(response, CallResponse) and response.autograd_message_id:
            body, needs_grad = incoming.body()
            message_id = response.autograd_message_id
            self.autograd.attach_recv(response.context_id, source, message_id, body.tensors, needs_grad)
