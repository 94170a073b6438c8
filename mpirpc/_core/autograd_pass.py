"""Carries out one backward pass at one worker: what ``autograd_protocol`` decides, by ``autograd_graph``.

Messages are handled where they arrive (short, no user code); runs of torch's engine happen on executor
threads, or on the thread that waits in ``backward``. Under the engine's lock state changes and actions are
collected; they are carried out after it is given back, and user objects are let go of then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

from mpirpc._core.autograd_context import AutogradContext
from mpirpc._core.autograd_gradients import accumulate, add, encode_gradients, storage_key
from mpirpc._core.autograd_graph import LocalGraph, explore, run
from mpirpc._core.autograd_hooks import hook_runs, leaf_of
from mpirpc._core.autograd_protocol import (
    ROOTS,
    Ack,
    Action,
    Answer,
    BackwardPass,
    Begin,
    Fail,
    Finished,
    RunHooks,
    StartRun,
    Structure,
)
from mpirpc._core.messages import (
    BackwardAck,
    BackwardBegin,
    BackwardFailed,
    Body,
    Gradient,
    Message,
    PassId,
)
from mpirpc._core.profiling import shown_as
from mpirpc.errors import RpcTimeoutError, WorkerLostError

Task = StartRun | RunHooks
"""Work for torch's engine."""

Gradients = Sequence[torch.Tensor | None]
"""One entry per tensor of a message that requires grad."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The local graph as it was when this worker was engaged."""

    graph: LocalGraph
    edges: dict[int, Sequence[GradientEdge]]
    """Send id -> edges of its tensors."""
    devices: dict[int, Sequence[torch.device]]
    """Send id -> where its tensors lie."""
    recv_edges: dict[int, Sequence[GradientEdge | None]]
    """Recv id -> edges of its tensors."""


class Event(Protocol):
    """A flag that one thread waits for."""

    def set(self) -> None:
        """Raise the flag. Thread: any."""

    def wait(self, deadline: float) -> bool:
        """Return True when the flag is up, False when the deadline passed; drives progress meanwhile."""


class AutogradPorts(Protocol):
    """What distributed autograd needs from its surroundings."""

    rank: int

    def send(self, dest: int, message: Message, body: Body | None = None) -> None:
        """Send a message, to this worker too. Thread: any.   Progress: never blocks."""

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` on an executor thread; user code may run there."""

    def new_event(self) -> Event:
        """Make a flag to wait for."""

    def dump_error(self, error: BaseException) -> Body:
        """Pack an exception with its traceback."""

    def load_error(self, source: int, body: Body) -> BaseException:
        """Rebuild an exception: the same type, its remote traceback as cause."""

    def describe(self, rank: int) -> str:
        """Name a worker in a message: ``'worker1' (rank 1)``."""


class PassRunner:
    """One pass at this worker, from the message (or call) that engaged it until its context is released.

    Args:
        ports: The surroundings.
        lock: The engine's; guards all state here and the context's records.
        context: The context.
        pass_id: The pass.
        retain_graph: What the user asked of this pass.
        parent: Source of the engaging message, None at the root.
    """

    def __init__(
        self,
        ports: AutogradPorts,
        lock: threading.Lock,
        context: AutogradContext,
        pass_id: PassId,
        retain_graph: bool,
        parent: int | None,
    ) -> None:
        self.pass_id = pass_id
        self.retain_graph = retain_graph
        self.error: BaseException | None = None
        self.snapshot_taken = False
        """The context's sends and recvs have been read: what is attached from now on is not part of it."""
        self._ports = ports
        self._lock = lock
        self._context = context
        self._parent = parent
        self._protocol: BackwardPass | None = None  # made by build
        self._waiting: list[Callable[[BackwardPass], list[Action]]] = []  # events that came before that
        self._snapshot: _Snapshot | None = None  # made by build, gone at the end
        self._gradients: dict[
            int, Gradients
        ] = {}  # send id -> what came; Gradient puts in, the last run takes out
        self._unhooked: dict[GradientEdge, torch.Tensor] = {}  # leaves whose hooks run last; gradients_lock
        self._taken: set[int] = set()  # memory of gradients that others look at; under gradients_lock
        self._sent_up_to = 0
        self._finished = False
        self._idle_event: Event | None = (
            None  # the root thread waits on it: give it runs rather than the executor
        )
        self._handed: list[Task] = []  # runs given to it

    @property
    def active(self) -> bool:
        """Whether anything is left to do here."""
        protocol = self._protocol
        return self.error is None and not (protocol is not None and protocol.done)

    # --- begin ---

    def build(self, roots: Sequence[GradientEdge] = (), ones: Sequence[torch.Tensor] = ()) -> list[Task]:
        """Look at the local graph and begin; return the runs that can start at once.

        Thread: any, not the one that runs progress: the walk may take milliseconds.
        """
        with self._lock:
            self.snapshot_taken = True
            sends, recvs = dict(self._context.sends), dict(self._context.recvs)
        self._sent_up_to = max(sends, default=0)
        dests = {send_id: record.dest for send_id, record in sends.items()}
        edges: dict[int, Sequence[GradientEdge]] = {i: record.edges for i, record in sends.items()}
        devices: dict[int, Sequence[torch.device]] = {i: record.devices for i, record in sends.items()}
        if roots:
            dests[ROOTS], edges[ROOTS] = self._ports.rank, roots
            devices[ROOTS] = [gradient.device for gradient in ones]
            self._gradients[ROOTS] = ones
        graph = explore(tuple(edges.values()), {record.node: recv_id for recv_id, record in recvs.items()})
        self._snapshot = _Snapshot(graph, edges, devices, {i: record.edges for i, record in recvs.items()})
        sources = {recv_id: record.source for recv_id, record in recvs.items()}
        structure = Structure(dests, sources, graph.reach, graph.components, bool(graph.hooked))
        with self._lock:
            protocol = BackwardPass(self._ports.rank, structure, self._parent)
            for event in self._waiting:
                event(protocol)
            self._waiting = []
            self._protocol = protocol
            actions = protocol.start() if self.error is None else []
        return self._perform(actions, {})

    def build_and_work(self) -> None:
        """Begin and carry out what can be. Thread: executor."""
        try:
            runs = self.build()
        except BaseException as error:
            self.fail(error)
        else:
            self.work(runs)

    # --- events (thread: any; never block) ---

    def on_begin(self, source: int, message: BackwardBegin) -> None:
        """The pass has begun at ``source``."""
        self._deliver(lambda p: p.on_begin(source, message.sent_up_to, message.wants_ack))

    def on_gradient(self, source: int, message: Gradient, gradients: Gradients) -> None:
        """The answer to one of our sends."""
        self._deliver(partial(self._take_gradient, source, message, gradients))

    def on_ack(self, source: int) -> None:
        """The work that our message to ``source`` set off is over."""
        self._deliver(lambda p: p.on_ack(source))

    def on_send_cancelled(self, send_id: int) -> None:
        """Nobody will answer this send."""
        self._deliver(lambda p: p.on_send_cancelled(send_id))

    def on_late_recv(self, source: int, recv_id: int) -> None:
        """A recv was attached after the snapshot."""
        self._deliver(lambda p: p.on_late_recv(source, recv_id))

    def _take_gradient(
        self, source: int, message: Gradient, gradients: Gradients, protocol: BackwardPass
    ) -> list[Action]:
        send_id = message.autograd_message_id
        if message.has_gradient and protocol.is_open(send_id):
            self._gradients[send_id] = gradients
        return protocol.on_gradient(
            source, send_id, message.has_gradient, message.sent_up_to, message.wants_ack, message.acks
        )

    def _deliver(self, event: Callable[[BackwardPass], list[Action]]) -> None:
        with self._lock:
            if self.error is not None:
                return
            if self._protocol is None:
                self._waiting.append(event)
                return
            actions = event(self._protocol)
        self._dispatch(self._perform(actions, {}))

    # --- runs ---

    def work(self, runs: list[Task]) -> None:
        """Carry out runs, and those they set off, here; all but the first of several go to other threads."""
        try:
            while runs:
                for other in runs[1:]:
                    self._ports.start(partial(self.work, [other]))
                runs = self._execute(runs[0])
        except BaseException as error:
            self.fail(error)

    def _dispatch(self, runs: list[Task]) -> None:
        """Get runs going from a thread that must not do them itself."""
        if not runs:
            return
        with self._lock:
            event = self._idle_event
            if event is not None:
                self._handed += runs
        if event is not None:
            event.set()
        else:
            for one in runs:
                self._ports.start(partial(self.work, [one]))

    def _execute(self, task: Task) -> list[Task]:
        if isinstance(task, RunHooks):
            return self._run_hooks()
        with self._lock:
            snapshot = self._snapshot
            given = [(i, self._gradients[i]) for i in task.sends] if snapshot is not None else []
        if snapshot is None:
            return []  # the pass failed meanwhile
        outputs, gradients = _outputs(snapshot, given)
        leaves = snapshot.graph.leaves[task.component] if task.last else ()
        slots = [edge for i in task.recvs for edge in snapshot.recv_edges[i] if edge is not None]
        with shown_as("torch::distributed::autograd::SendRpcBackward"):
            found = run(outputs, gradients, [*leaves, *slots], self.retain_graph or not task.last)
        if self.error is not None:
            return []  # likewise: the context may be in use by the next pass
        answers = _sort_answers(snapshot, task, found[len(leaves) :])
        self._accumulate(snapshot.graph.hooked, leaves, found, answers)
        with_gradient = [i for i, gs in answers.items() if any(g is not None for g in gs)]
        with self._lock:
            if self._protocol is None or self.error is not None:
                return []
            if task.last:
                for send_id in task.sends:
                    del self._gradients[send_id]  # `given` still holds them until the lock is back
            actions = self._protocol.on_run_finished(task, with_gradient)
        return self._perform(actions, answers)

    def _accumulate(
        self,
        hooked: Collection[Node],
        leaves: Sequence[GradientEdge],
        found: Sequence[torch.Tensor | None],
        answers: dict[int, Gradients],
    ) -> None:
        """Add the leaves' gradients to the context's, those with hooks to what these are to see."""
        context = self._context
        pairs = [(edge, g) for edge, g in zip(leaves, found, strict=False) if g is not None]
        with context.gradients_lock:
            self._taken.update(storage_key(g) for gs in answers.values() for g in gs if g is not None)
            for edge, gradient in pairs:
                if edge.node in hooked:
                    known = self._unhooked.get(edge)
                    self._unhooked[edge] = gradient if known is None else add(known, gradient)
            plain = [(leaf_of(edge), g) for edge, g in pairs if edge.node not in hooked]
            accumulate(context.gradients, plain, self._taken)

    def _run_hooks(self) -> list[Task]:
        """Let the leaves' hooks see their gradients, then add these to the context's."""
        context = self._context
        with context.gradients_lock:
            edges, gradients = list(self._unhooked), list(self._unhooked.values())
            self._unhooked = {}
        for run_of_hooks in hook_runs(edges, gradients):
            with run_of_hooks.alone():
                with context.gradients_lock:
                    before = dict(context.gradients) if run_of_hooks.adds_up else {}
                found = run_of_hooks.accumulate(before)
                if self.error is not None:
                    return []
                with context.gradients_lock:
                    if run_of_hooks.adds_up:
                        for leaf in run_of_hooks.leaves:  # a hook may have used up what there was
                            context.gradients.pop(leaf, None)
                        context.gradients.update(found)
                    else:
                        accumulate(context.gradients, found.items(), self._taken)
        with self._lock:
            if self._protocol is None or self.error is not None:
                return []
            actions = self._protocol.on_hooks_run()
        return self._perform(actions, {})

    # --- actions ---

    def _perform(self, actions: list[Action], answers: dict[int, Gradients]) -> list[Task]:
        """Send the messages, note the end; return the runs for the caller to get going."""
        runs: list[Task] = []
        for action in actions:
            if isinstance(action, (StartRun, RunHooks)):
                runs.append(action)
            elif isinstance(action, Answer):
                with shown_as("torch::distributed::autograd::RecvRpcBackward"):
                    self._send_answer(action, answers)
            elif isinstance(action, Begin):
                self._ports.send(action.dest, self._begin(action))
            elif isinstance(action, Ack):
                self._ports.send(action.dest, BackwardAck(self._context.context_id, self.pass_id))
            elif isinstance(action, Finished):
                self._finish()
        return runs

    def _begin(self, action: Begin) -> BackwardBegin:
        return BackwardBegin(
            self._context.context_id,
            self.pass_id,
            self.retain_graph,
            sent_up_to=self._sent_up_to,
            wants_ack=action.wants_ack,
        )

    def _send_answer(self, answer: Answer, answers: dict[int, Gradients]) -> None:
        message = Gradient(
            self._context.context_id,
            self.pass_id,
            answer.recv_id,
            answer.has_gradient,
            self.retain_graph,
            sent_up_to=self._sent_up_to,
            wants_ack=answer.wants_ack,
            acks=answer.acks,
        )
        body = encode_gradients(answers[answer.recv_id]) if answer.has_gradient else None
        self._ports.send(answer.dest, message, body)

    # --- end ---

    def wait(self, timeout: float, deadline: float) -> None:
        """Wait for the end of the pass everywhere, doing runs meanwhile. Thread: ``backward``'s.

        A run that is done here is not broken off at the deadline: it is looked at in between.

        Args:
            timeout: What the deadline was made from, in seconds.
            deadline: On the monotonic clock.

        Raises:
            BaseException: What failed, here or elsewhere; RpcTimeoutError when the deadline passed.
        """
        while True:
            with self._lock:
                if self.error is not None:
                    raise self.error
                if self._finished:
                    return
                runs, self._handed = self._handed, []
                event = self._idle_event = None if runs else self._ports.new_event()
            if event is None:
                self.work(runs)
            elif not event.wait(deadline):
                self._time_out(timeout)

    def _time_out(self, timeout: float) -> None:
        with self._lock:
            if self._finished or self._handed or self.error is not None or self._protocol is None:
                return
            missing = self._protocol.waits_for()
        names = ", ".join(self._ports.describe(rank) for rank in sorted(missing))
        self.fail(
            RpcTimeoutError(
                f"backward pass {self.pass_id} of context {self._context.context_id} ran for more than set "
                f"timeout ({timeout:g} s): no answer yet from {names}",
                "raise timeout=, or look at these workers: a hook or function may still be running there, or "
                "they wait for others that their calls went to",
                worker=names,
                timeout=timeout,
            )
        )

    def _finish(self) -> None:
        """All is done here: wake the root's thread, let go of the graph."""
        with self._lock:
            self._finished = True
            event, self._idle_event = self._idle_event, None
            garbage = self._forget()
        if event is not None:
            event.set()
        del garbage

    def fail(self, error: BaseException) -> None:
        """The pass failed at this worker: end it, tell the neighbours."""
        self.abort(error, self._ports.rank, None)

    def fail_if_lost(self, gone: set[int]) -> None:
        """Fail if something is left to do and one of the workers that are gone took part in the context."""
        lost = sorted(self._context.known_workers & gone)
        if lost and self.active:
            names = ", ".join(map(self._ports.describe, lost))
            self.fail(WorkerLostError(f"a backward pass needs {names}, which left the group"))

    def abort(self, error: BaseException, failed_on: int, body: Body | None) -> None:
        """End the pass and tell the neighbours, once. ``body``: the error as it came from elsewhere."""
        with self._lock:
            if self.error is not None or self._finished:
                return
            self.error = error
            protocol = self._protocol or BackwardPass(self._ports.rank, Structure({}, {}, {}, ()), None)
            fails = protocol.on_failed(sorted(self._context.known_workers - {self._ports.rank}))
            self._waiting = []
            event, self._idle_event = self._idle_event, None
            garbage = self._forget()
        if event is not None:
            event.set()
        message = BackwardFailed(self._context.context_id, self.pass_id, failed_on)
        dests = [action.dest for action in fails if isinstance(action, Fail)]
        if dests:
            body = self._ports.dump_error(error) if body is None else body
        for dest in dests:
            self._ports.send(dest, message, body)
        del garbage

    def _forget(self) -> object:
        """Take out all that holds user objects; the caller drops it after giving back the lock."""
        garbage = (self._snapshot, self._gradients, self._handed, self._unhooked)
        self._unhooked = {}
        self._snapshot, self._gradients, self._handed = None, {}, []
        return garbage


def _outputs(
    snapshot: _Snapshot, given: Sequence[tuple[int, Gradients]]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Edges that a run starts from, and their gradients, moved to where the tensors were sent from."""
    outputs: list[GradientEdge] = []
    moved: list[torch.Tensor] = []
    for send_id, gradients in given:
        edges, devices = snapshot.edges[send_id], snapshot.devices[send_id]
        for edge, device, gradient in zip(edges, devices, gradients, strict=True):
            if gradient is not None:
                outputs.append(edge)
                moved.append(gradient if gradient.device == device else gradient.to(device))
    return outputs, moved


def _sort_answers(
    snapshot: _Snapshot, task: StartRun, found: Sequence[torch.Tensor | None]
) -> dict[int, Gradients]:
    """Sort what a run found for its recvs by message."""
    rest = iter(found)
    return {
        recv_id: [None if edge is None else next(rest) for edge in snapshot.recv_edges[recv_id]]
        for recv_id in task.recvs
    }
