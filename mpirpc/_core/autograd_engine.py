"""Distributed autograd at one worker: contexts, the pairs of send and recv functions, backward passes.

The call machinery attaches sends and recvs while it handles a call; ``backward`` starts a pass; messages of
passes come in through :meth:`AutogradEngine.on_message`. One pass is carried out by ``autograd_pass.py``. How
it all fits together: ``docs/design/autograd.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from mpirpc._core.autograd_checks import check_roots, check_types
from mpirpc._core.autograd_context import COUNTER_BITS, AutogradContext, RecvRecord, SendRecord, Tombstones
from mpirpc._core.autograd_gradients import decode_gradients
from mpirpc._core.autograd_graph import connect, edge_of
from mpirpc._core.autograd_pass import AutogradPorts, PassRunner
from mpirpc._core.messages import (
    NO_CONTEXT,
    BackwardAck,
    BackwardBegin,
    BackwardFailed,
    Body,
    ContextRelease,
    Gradient,
    Message,
    PassId,
)
from mpirpc._core.profiling import shown_as
from mpirpc._core.timing import deadline_after
from mpirpc.errors import AutogradError, InternalError, RpcError

__all__ = ["AutogradEngine", "AutogradPorts", "AutogradStats"]


@dataclass(frozen=True, slots=True)
class AutogradStats:
    """Counts for diagnosis and leak checks."""

    contexts: int
    passes: int
    """Those with something left to do at this worker."""
    sends: int
    recvs: int


class _OfThread(threading.local):
    """The current context of a thread."""

    context_id = NO_CONTEXT


class AutogradEngine:
    """All distributed autograd state of one worker. Thread: any, for every method.

    Args:
        ports: The surroundings: messages, threads, waiting.
    """

    MESSAGES = (BackwardBegin, Gradient, BackwardAck, BackwardFailed, ContextRelease)
    """What :meth:`on_message` takes."""

    def __init__(self, ports: AutogradPorts) -> None:
        self._ports = ports
        self._rank = ports.rank
        # Guards everything below and the records; short, nothing is sent and no user code runs under it.
        self._lock = threading.Lock()
        # Contexts known here; new_context, enter and messages of passes put in, release takes out.
        self._contexts: dict[int, AutogradContext] = {}
        # Context -> pass -> its runner. Engaging messages and backward put in, the context's release takes
        # out; own passes go when they are over, those of others must be remembered to know their late
        # messages.
        self._passes: dict[int, dict[PassId, PassRunner]] = {}
        self._tombstones = Tombstones()
        self._num_contexts = 0
        self._num_sends = 0
        self._num_passes = 0
        self._gone: set[int] = set()  # workers that left the group; lose() puts in
        self.of_thread = _OfThread()

    def __repr__(self) -> str:
        return f"<AutogradEngine rank={self._rank} {self.stats()}>"

    # --- contexts ---

    @property
    def current_context_id(self) -> int:
        """The context that calls made by this thread belong to; 0 if none."""
        return self.of_thread.context_id

    @current_context_id.setter
    def current_context_id(self, context_id: int) -> None:
        self.of_thread.context_id = context_id

    @property
    def max_id(self) -> int:
        """The highest id this worker can give out."""
        return self._rank << COUNTER_BITS | ((1 << COUNTER_BITS) - 1)

    def new_context(self) -> int:
        """Make a context and make it this thread's current one.

        Raises:
            AutogradError: This thread is in a context already.
        """
        if self.current_context_id:
            raise AutogradError(
                f"Already have an autograd context id for this thread: {self.current_context_id}",
                hint="leave the first context before entering another; contexts do not nest",
            )
        with self._lock:
            self._num_contexts += 1
            context_id = self._rank << COUNTER_BITS | self._num_contexts
            self._add_context(context_id)
        self.current_context_id = context_id
        return context_id

    def release_context(self, context_id: int) -> None:
        """Free a context here and, by messages, on every worker it touched.

        Raises:
            AutogradError: No such context here.
        """
        self.retrieve(context_id)
        if self.current_context_id == context_id:
            self.current_context_id = NO_CONTEXT
        self._release(context_id, source=self._rank)

    def enter(self, context_id: int, source: int) -> bool:
        """A request of this context came from ``source``: know the context from now on.

        Returns:
            False when it is released already: the call is to run without recording.
        """
        with self._lock:
            context = self._known_or_new(context_id)
            if context is not None:
                context.sources.add(source)
            return context is not None

    def note_request(self, context_id: int, dest: int) -> bool:
        """A request of this context goes to ``dest``, which must then be told of the context's end.

        Returns:
            False when it is released already: the request must not name it, for nobody would tell ``dest``.
        """
        with self._lock:
            context = self._contexts.get(context_id)
            if context is not None:
                context.dests.add(dest)
            return context is not None

    def retrieve(self, context_id: int) -> AutogradContext:
        """The record of a context, to look at.

        Raises:
            AutogradError: No such context here.
        """
        with self._lock:
            context = self._contexts.get(context_id)
        if context is None:
            raise AutogradError(
                f"Could not find autograd context with id: {context_id}",
                hint="a context lives until its `with` block ends, on the workers that its calls touched",
            )
        return context

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Gradients accumulated in this context at this worker so far: leaf -> gradient. The dict is a copy.

        Raises:
            AutogradError: No such context here.
        """
        context = self.retrieve(context_id)
        with context.gradients_lock:
            return dict(context.gradients)

    def stats(self) -> AutogradStats:
        """Count what is alive."""
        with self._lock:
            contexts = self._contexts.values()
            return AutogradStats(
                contexts=len(contexts),
                passes=sum(runner.active for runners in self._passes.values() for runner in runners.values()),
                sends=sum(len(context.sends) for context in contexts),
                recvs=sum(len(context.recvs) for context in contexts),
            )

    # --- calls ---

    def attach_send(self, context_id: int, dest: int, tensors: Sequence[torch.Tensor]) -> int:
        """Record those of ``tensors`` that require grad as one send to ``dest``.

        Nothing is recorded under ``torch.no_grad()``, as in torch.

        Returns:
            The autograd_message_id to put into the message; 0 if nothing was recorded.
        """
        if not torch.is_grad_enabled():
            return 0
        needing = [t for t in tensors if t.requires_grad]
        if not needing:
            return 0
        record = SendRecord(dest, tuple([edge_of(t) for t in needing]), tuple([t.device for t in needing]))
        with self._lock:
            context = self._contexts.get(context_id)
            if context is None:
                return 0
            self._num_sends += 1
            send_id = self._rank << COUNTER_BITS | self._num_sends
            context.sends[send_id] = record
            context.dests.add(dest)
        return send_id

    def cancel_send(self, context_id: int, autograd_message_id: int) -> None:
        """Forget a send: its message was not sent, or its receiver could not take the tensors."""
        with self._lock:
            context = self._contexts.get(context_id)
            record = context.sends.pop(autograd_message_id, None) if context is not None else None
            runners = self._seen_by(context_id)
        for runner in runners:
            runner.on_send_cancelled(autograd_message_id)
        del record

    def attach_recv(
        self,
        context_id: int,
        source: int,
        autograd_message_id: int,
        tensors: list[torch.Tensor],
        needs_grad: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Connect received tensors to the context: gradients that reach them will go to ``source``.

        Args:
            context_id: The context.
            source: Worker that the message came from.
            autograd_message_id: What ``attach_send`` returned there.
            tensors: The message's tensors.
            needs_grad: Which of them required grad there.

        Returns:
            The tensors to use from now on; those not flagged (all, if the context is dead) are the ones
            given.

        Copies: none.
        """
        flagged = [t for t, flag in zip(tensors, needs_grad, strict=True) if flag]
        if not flagged or not autograd_message_id or context_id not in self._contexts:
            return tensors
        # The same object twice is connected once; its gradient goes to the last of its places.
        places = {id(t): place for place, t in enumerate(flagged)}
        order = sorted(places.values())
        node, connected = connect([flagged[place] for place in order])
        fresh = dict(zip(order, connected, strict=True))
        edges: list[GradientEdge | None] = [None] * len(flagged)
        for output_nr, place in enumerate(order):
            edges[place] = GradientEdge(node, output_nr)
        with self._lock:
            context = self._contexts.get(context_id)
            if context is None:
                return tensors
            context.recvs[autograd_message_id] = RecvRecord(source, node, tuple(edges))
            context.sources.add(source)
            runners = self._seen_by(context_id)
        for runner in runners:
            runner.on_late_recv(source, autograd_message_id)
        return [fresh[places[id(t)]] if flag else t for t, flag in zip(tensors, needs_grad, strict=True)]

    # --- backward ---

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool = False,
        timeout: float = 0,
    ) -> None:
        """Compute the gradients of the sum of ``roots`` on all workers that took part, into the context.

        Args:
            context_id: The context.
            roots: Scalar tensors of this worker.
            retain_graph: Keep the graphs for another pass.
            timeout: Limit of the pass in seconds; 0 means none.

        Raises:
            TypeError: An argument is not what it should be.
            AutogradError: No such context; a root that is no scalar, requires no grad or has no graph; or the
                pass failed on another worker, with the exception from there as cause.
            RpcTimeoutError: Not over in time.
            BaseException: What failed at this worker, as it was raised.
        """
        check_types(context_id, roots)
        context = self.retrieve(context_id)
        check_roots(roots)
        deadline = deadline_after(timeout)
        ones = [torch.ones_like(root) for root in roots]
        edges = [edge_of(root) for root in roots]
        with self._lock:
            self._num_passes += 1
            pass_id = PassId(self._rank, self._num_passes)
            runner = PassRunner(self._ports, self._lock, context, pass_id, retain_graph, None)
            if context_id in self._contexts:
                self._passes[context_id][pass_id] = runner
        try:
            with shown_as("torch::distributed::autograd::backward"):
                runner.work(runner.build(edges, ones))
                runner.fail_if_lost(self._gone)
                runner.wait(timeout, deadline)
        except BaseException as error:
            runner.fail(error)
            raise
        finally:
            with self._lock:
                self._passes.get(context_id, {}).pop(pass_id, None)

    # --- messages ---

    def on_message(self, source: int, message: Message, body: Body | None = None) -> None:
        """Handle a message of a backward pass or the end of a context. Never blocks, runs no user code."""
        if isinstance(message, Gradient):
            runner = self._runner(source, message)
            if runner is not None:
                gradients = (
                    decode_gradients(source, body) if message.has_gradient and body is not None else ()
                )
                runner.on_gradient(source, message, gradients)
        elif isinstance(message, BackwardBegin):
            runner = self._runner(source, message)
            if runner is not None:
                runner.on_begin(source, message)
        elif isinstance(message, BackwardAck):
            runner = self._find(message.context_id, message.pass_id)
            if runner is not None:
                runner.on_ack(source)
        elif isinstance(message, BackwardFailed):
            self._on_failed(message, body or Body())
        elif isinstance(message, ContextRelease):
            self._release(message.context_id, source)
        else:
            raise InternalError(f"{type(message).__name__} is no message of distributed autograd")

    def lose(self, worker: int) -> None:
        """A worker is gone: fail the passes that need it, now and later, and free the contexts it made."""
        self._gone.add(worker)
        with self._lock:
            runners = [runner for runners in self._passes.values() for runner in runners.values()]
            orphans = [context_id for context_id in self._contexts if context_id >> COUNTER_BITS == worker]
        for runner in runners:
            runner.fail_if_lost(self._gone)
        for context_id in orphans:
            self._release(context_id, worker)

    def close(self, error: BaseException) -> None:
        """End all passes with ``error`` and free all contexts, without telling anybody."""
        with self._lock:
            garbage = self._contexts
            runners = [runner for runners in self._passes.values() for runner in runners.values()]
            for context_id, context in garbage.items():
                self._tombstones.add(context_id)
                context.dests.clear()
                context.sources.clear()
            self._contexts, self._passes = {}, {}
        for runner in runners:
            runner.fail(error)
        del garbage

    # --- steps; those that say so need the lock ---

    def _add_context(self, context_id: int) -> AutogradContext:
        """Needs the lock."""
        context = self._contexts[context_id] = AutogradContext(context_id)
        self._passes[context_id] = {}
        return context

    def _known_or_new(self, context_id: int) -> AutogradContext | None:
        """Needs the lock. None if it was released, or is one of ours that we never made."""
        context = self._contexts.get(context_id)
        if (
            context is None
            and context_id not in self._tombstones
            and context_id >> COUNTER_BITS not in {self._rank, *self._gone}
        ):
            context = self._add_context(context_id)
        return context

    def _seen_by(self, context_id: int) -> list[PassRunner]:
        """Needs the lock. Passes that read the context's sends and recvs before now."""
        runners = self._passes.get(context_id)
        return [runner for runner in runners.values() if runner.snapshot_taken] if runners else []

    def _find(self, context_id: int, pass_id: PassId) -> PassRunner | None:
        with self._lock:
            return self._passes.get(context_id, {}).get(pass_id)

    def _runner(self, source: int, message: Gradient | BackwardBegin) -> PassRunner | None:
        """The runner of a message's pass, engaged by it if need be; None if context or pass are over."""
        pass_id = message.pass_id
        with self._lock:
            context = self._known_or_new(message.context_id)
            if context is None:
                return None
            context.sources.add(source)
            runners = self._passes[message.context_id]
            runner = runners.get(pass_id)
            if runner is not None or pass_id.root == self._rank:
                return runner
            runner = PassRunner(self._ports, self._lock, context, pass_id, message.retain_graph, source)
            runners[pass_id] = runner
        runner.fail_if_lost(self._gone)
        self._ports.start(runner.build_and_work)
        return runner

    def _on_failed(self, message: BackwardFailed, body: Body) -> None:
        """End the pass here; remember it as failed if it was not known yet."""
        context_id, pass_id, rank = message.context_id, message.pass_id, message.failed_on
        with self._lock:
            context = self._contexts.get(context_id)
            if context is None:
                return
            runners = self._passes[context_id]
            runner = runners.get(pass_id)
            if runner is None and pass_id.root != self._rank:
                runner = PassRunner(self._ports, self._lock, context, pass_id, False, None)
                runners[pass_id] = runner
        if runner is not None:
            runner.abort(self._failure(context_id, pass_id, rank, body), rank, body)

    def _failure(self, context_id: int, pass_id: PassId, rank: int, body: Body) -> BaseException:
        """What ``backward`` raises for a failure elsewhere: errors of ours as they are, others as a cause."""
        error = self._ports.load_error(rank, body)
        if isinstance(error, RpcError) and not isinstance(error, AutogradError):
            return error
        failure = AutogradError(
            f"Error on Node {rank}: {error}\n"
            f"in backward pass {pass_id} of context {context_id}, at {self._ports.describe(rank)}"
        )
        failure.__cause__ = error
        return failure

    def _release(self, context_id: int, source: int) -> None:
        """Free the context and tell the workers that got something of it from here."""
        with self._lock:
            self._tombstones.add(context_id)
            context = self._contexts.pop(context_id, None)
            runners = self._passes.pop(context_id, {})
        if context is None:
            return
        for dest in sorted(context.dests - {source, self._rank}):
            self._ports.send(dest, ContextRelease(context_id))
        context.dests.clear()
        context.sources.clear()
        for runner in runners.values():
            if runner.active:
                runner.fail(
                    AutogradError(f"context {context_id} was released during backward pass {runner.pass_id}")
                )
