"""One backward pass at one worker: event in, actions out.

A worker knows its *sends* (messages with tensors that it sent, each waiting for exactly one answer: a
gradient or "none") and its *recvs* (messages with tensors that it got, each to be answered exactly once).
Which gradients depend on which is given as *components* and, per recv, its *reach* (see
``autograd_graph.py``). Decided here: when which run of the local graph starts, who is told that the pass has
begun, what is acknowledged when, and when the pass is over.

The first message that engages a worker makes its source the worker's *parent*; the worker acknowledges it
when all its own work is done. A message wants an acknowledgement only if its receiver may not be engaged yet,
so at most one per pair of workers does, and those that engaged somebody form a tree that ends at the root.

Rules for this file: no MPI, no threads, no clock, no torch. Messages may come in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

ROOTS = 0
"""Send id of the pass's roots: they count as one more send at the root's worker, resolved at once."""


@dataclass(frozen=True, slots=True)
class Component:
    """Sends and recvs that must be looked at together, because their paths meet in the graph."""

    sends: int
    """Bit set: bit i is the i-th send of the structure."""
    recvs: tuple[int, ...]
    """Ids of the recvs that these sends reach."""
    has_leaves: bool


@dataclass(frozen=True, slots=True)
class Structure:
    """What the local graph looks like from outside."""

    dests: Mapping[int, int]
    """Send id -> rank it was sent to, in the order of the bits; the roots' entry, if any, is ``ROOTS``."""
    sources: Mapping[int, int]
    """Recv id -> rank it came from."""
    reach: Mapping[int, int]
    """Recv id -> bit set of the sends that reach it; a recv that none reaches has no entry."""
    components: tuple[Component, ...]
    has_hooks: bool = False
    """Some leaf has hooks that want its whole gradient of the pass: they run once, after the last run."""


@dataclass(frozen=True, slots=True)
class StartRun:
    """Compute gradients from ``sends`` to ``recvs`` (and the component's leaves) in one run of the engine."""

    component: int
    sends: tuple[int, ...]
    recvs: tuple[int, ...]
    last: bool
    """The component's last run: it does the leaves too, and the graph may be freed."""


@dataclass(frozen=True, slots=True)
class RunHooks:
    """All runs are over: let the leaves' hooks see their gradients."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send the answer to one recv: its gradient or "none"."""

    dest: int
    recv_id: int
    has_gradient: bool
    wants_ack: bool
    acks: bool = False
    """The answer also acknowledges the message by which ``dest`` engaged this worker."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell a worker that tensors were sent to that the pass has begun."""

    dest: int
    wants_ack: bool


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledge a message of ``dest``."""

    dest: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a neighbour that the pass failed."""

    dest: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do at this worker; at the root: the pass is over everywhere."""


Action = StartRun | RunHooks | Answer | Begin | Ack | Fail | Finished


class _OpenComponent:
    """What is left to do in one component."""

    __slots__ = ("has_leaves", "recvs", "running", "sends")

    def __init__(self, component: Component) -> None:
        self.sends = component.sends
        self.recvs = list(component.recvs)
        self.has_leaves = component.has_leaves
        self.running = False


class BackwardPass:
    """One pass at one worker.

    Events may be given before :meth:`start`; they are kept in mind and take effect there. Each event returns
    the actions it sets off, to be carried out in any order.

    Args:
        rank: This worker.
        structure: The local graph; with the send ``ROOTS`` at the root's worker.
        parent: Source of the message that engaged this worker, None at the root's.
    """

    def __init__(self, rank: int, structure: Structure, parent: int | None) -> None:
        self._rank = rank
        self._structure = structure
        self._parent = parent
        self._ids = tuple(structure.dests)
        # Send id -> bit, of all sends; emptied when all is done.
        self._bits = {send_id: 1 << position for position, send_id in enumerate(self._ids)}
        self._open = (1 << len(self._ids)) - 1  # sends without an answer: Gradient takes a bit out
        self._with_gradient = 0  # sends that got a gradient
        # Component number -> what is left of it; goes when its last run starts or it turns out to need none.
        self._components = {number: _OpenComponent(c) for number, c in enumerate(structure.components)}
        self._component_of = {
            bit: number for number, c in enumerate(structure.components) for bit in _bits_of(c.sends)
        }
        self._num_running = 0
        self._owes_hooks = structure.has_hooks
        self._heard = {rank}  # workers known to be engaged
        self._asked: set[int] = set()  # workers that were sent a message that wants an acknowledgement
        self._unacknowledged: set[int] = set()  # those of them that have not sent it: Ack, Gradient take out
        self._owes_parent = False  # the parent's message is to be acknowledged when all is done
        self._sent_up_to: dict[int, int] = {}  # worker -> highest send id that it knew when it was engaged
        self._late: dict[int, list[int]] = {}  # source not heard of yet -> recvs attached after the start
        self._started = False
        self.failed = False
        self.done = False
        """Nothing is left to do here; only late recvs and stray messages may still come."""
        self._actions: list[Action] = []

    # --- events ---

    def start(self) -> list[Action]:
        """Begin: answer what nothing reaches, start what can run, tell the workers that were sent to."""
        self._started = True
        if ROOTS in self._bits:
            self._resolve(ROOTS, has_gradient=True)
        for recv_id, source in self._structure.sources.items():
            if recv_id not in self._structure.reach:
                self._answer(source, recv_id, has_gradient=False)
        for number in tuple(self._components):
            self._advance(number)
        self._tell_dests()
        return self._settle()

    def on_begin(self, source: int, sent_up_to: int, wants_ack: bool) -> list[Action]:
        """The pass has begun at ``source``, which had sent messages up to this id."""
        if not self.failed:
            self._hear(source, sent_up_to, wants_ack)
        return self._settle()

    def on_gradient(
        self, source: int, send_id: int, has_gradient: bool, sent_up_to: int, wants_ack: bool, acks: bool
    ) -> list[Action]:
        """The answer to one of our sends; ignored if it is not open (cancelled, or sent after the start)."""
        if not self.failed:
            self._hear(source, sent_up_to, wants_ack)
            if acks:
                self._unacknowledged.discard(source)
            self._resolve(send_id, has_gradient)
        return self._settle()

    def on_ack(self, source: int) -> list[Action]:
        """All work that our message to ``source`` set off is over."""
        self._heard.add(source)
        self._unacknowledged.discard(source)
        return self._settle()

    def on_send_cancelled(self, send_id: int) -> list[Action]:
        """This message never arrived: nobody will answer it."""
        if not self.failed:
            self._resolve(send_id, has_gradient=False)
        return self._settle()

    def on_late_recv(self, source: int, recv_id: int) -> list[Action]:
        """A recv was attached after the local graph was looked at: nothing of this pass can depend on it.

        It is answered if ``source`` counts on it: if it was sent before ``source`` looked at its own graph.
        """
        if source not in self._sent_up_to:
            self._late.setdefault(source, []).append(recv_id)
        elif not self.failed and recv_id <= self._sent_up_to[source]:
            self._answer(source, recv_id, has_gradient=False)
        return self._settle()

    def on_run_finished(self, run: StartRun, with_gradient: Collection[int]) -> list[Action]:
        """A run is over; ``with_gradient`` are those of its recvs that got one."""
        self._num_running -= 1
        if self.failed:
            return []
        for recv_id in run.recvs:
            self._answer(self._structure.sources[recv_id], recv_id, recv_id in with_gradient)
        if run.component in self._components:
            self._components[run.component].running = False
            self._advance(run.component)
        return self._settle()

    def on_hooks_run(self) -> list[Action]:
        """The leaves' hooks have run."""
        self._num_running -= 1
        return self._settle()

    def on_failed(self, neighbours: Iterable[int]) -> list[Action]:
        """The pass failed here or elsewhere: tell all neighbours, once; events set off nothing any more."""
        if self.failed:
            return []
        self.failed = True
        self._forget()
        return [Fail(dest) for dest in neighbours]

    # --- questions ---

    def is_open(self, send_id: int) -> bool:
        """Whether this send still waits for its answer."""
        return bool(self._bits.get(send_id, 0) & self._open)

    def open_sends(self) -> dict[int, int]:
        """Sends that wait for their answer: id -> rank they were sent to."""
        return {i: dest for i, dest in self._structure.dests.items() if self.is_open(i)}

    def waits_for(self) -> set[int]:
        """Workers that must do something before this one is done; itself while runs are going on here."""
        own = {self._rank} if self._num_running else set()
        return own | self._unacknowledged | set(self.open_sends().values())

    # --- steps ---

    def _hear(self, source: int, sent_up_to: int, wants_ack: bool) -> None:
        self._heard.add(source)
        if source not in self._sent_up_to:
            self._sent_up_to[source] = sent_up_to
            for recv_id in self._late.pop(source, ()):
                if recv_id <= sent_up_to:
                    self._answer(source, recv_id, has_gradient=False)
        if wants_ack and source == self._parent:
            self._owes_parent = True
        elif wants_ack:
            self._actions.append(Ack(source))

    def _resolve(self, send_id: int, has_gradient: bool) -> None:
        bit = self._bits.get(send_id, 0) & self._open
        if not bit:
            return
        self._open &= ~bit
        if has_gradient:
            self._with_gradient |= bit
        if self._started:
            self._advance(self._component_of[bit])

    def _advance(self, number: int) -> None:
        """Start the run that this component is ready for, if any.

        One run at a time in a component: the last one may free the graph. Recvs whose reach is resolved are
        answered by an early run if other sends are open: these may depend on them (A->B->A->B).
        """
        component = self._components.get(number)
        if component is None or component.running:
            return
        ready = self._take_ready(component)
        if not component.sends & self._open:
            del self._components[number]
            sends = component.sends & self._with_gradient
            if sends and (ready or component.has_leaves):
                self._start_run(number, sends, ready, last=True)
        elif ready:
            component.running = True
            sends = 0
            for recv_id in ready:
                sends |= self._structure.reach[recv_id]
            self._start_run(number, sends & self._with_gradient, ready, last=False)

    def _take_ready(self, component: _OpenComponent) -> list[int]:
        """Take out recvs whose reach is resolved; answer "none" if without gradient, return the others."""
        ready, waiting = [], []
        for recv_id in component.recvs:
            reach = self._structure.reach[recv_id]
            if reach & self._open:
                waiting.append(recv_id)
            elif reach & self._with_gradient:
                ready.append(recv_id)
            else:
                self._answer(self._structure.sources[recv_id], recv_id, has_gradient=False)
        component.recvs = waiting
        return ready

    def _start_run(self, number: int, sends: int, recvs: list[int], last: bool) -> None:
        self._num_running += 1
        ids = tuple(self._ids[bit.bit_length() - 1] for bit in _bits_of(sends))
        self._actions.append(StartRun(number, ids, tuple(recvs), last))

    def _tell_dests(self) -> None:
        """Tell all workers that owe an answer, except those that an answer goes to right now."""
        told = {action.dest for action in self._actions if isinstance(action, Answer)}
        for action in self._actions:
            if isinstance(action, StartRun):
                told.update(self._structure.sources[recv_id] for recv_id in action.recvs)
        for dest in dict.fromkeys(self.open_sends().values()):
            if dest not in told:
                self._actions.append(Begin(dest, self._wants_ack(dest)))

    def _answer(self, source: int, recv_id: int, has_gradient: bool) -> None:
        self._actions.append(Answer(source, recv_id, has_gradient, self._wants_ack(source)))

    def _wants_ack(self, dest: int) -> bool:
        if dest in self._heard or dest in self._asked:
            return False
        self._asked.add(dest)
        self._unacknowledged.add(dest)
        return True

    def _settle(self) -> list[Action]:
        """End of every event: see whether all is done, and return the actions collected."""
        if not self._started:
            return []
        actions, self._actions = self._actions, []
        if self.failed:
            return []
        if self._owes_hooks and not (self._components or self._num_running):
            self._owes_hooks = False
            self._num_running = 1
            actions.append(RunHooks())
        if not (self._open or self._num_running or self._unacknowledged):
            if not self.done:
                self.done = True
                self._forget()
                actions.append(Finished())
            if self._owes_parent and self._parent is not None:
                self._owes_parent = False
                _acknowledge(self._parent, actions)
        return actions

    def _forget(self) -> None:
        self._bits.clear()
        self._components.clear()
        self._component_of.clear()
        self._structure = Structure({}, {}, {}, ())


def _acknowledge(dest: int, actions: list[Action]) -> None:
    """Let the last answer to ``dest`` among the actions carry the acknowledgement, or add an Ack."""
    for position in range(len(actions) - 1, -1, -1):
        action = actions[position]
        if isinstance(action, Answer) and action.dest == dest:
            actions[position] = replace(action, acks=True)
            return
    actions.append(Ack(dest))


def _bits_of(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
