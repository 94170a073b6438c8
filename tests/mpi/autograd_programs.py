"""Random distributed programs as data: :func:`write_program` makes the same one from a seed on every rank.

A *program* has one to three *strands* that run at the same time, each with a driver and an autograd context
of its own. A strand has *phases*: a *block* is run, then backward passes from some of its values. A block is
a list of steps for one rank; its frame collects numbered tensors (arguments first), RRefs and calls. A call
runs another block. What the steps do is in ``autograd_fuzz``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_LEAVES = 3
"""Dense parameters per rank; number ``NUM_LEAVES`` is a table for look-ups with sparse gradients."""

OPERATIONS = (
    "add mul sin tanh maximum matmul chunk softmax relu custom packed complex mask detach no_grad".split()
)
VIEWS = ["transpose", "row", "column", "same"]
CHANGES = ["mul", "view", "add", "cut"]
BLOCK_OPTIONS: list[dict[str, int]] = [{}, {"eager_limit": 0}, {"eager_limit": 0, "chunk_nbytes": 1000}]
"""Options of the RPC group, in turns of ``SEEDS_PER_GROUP`` seeds: messages eager, zero-copy, in pieces."""
SEEDS_PER_GROUP = 20


@dataclass(frozen=True)
class Item:
    """What a call sends: a tensor or an RRef of the frame."""

    is_rref: bool
    index: int


@dataclass(frozen=True)
class Leaf:
    """Take one of the rank's own parameters."""

    index: int


@dataclass(frozen=True)
class Lookup:
    """Rows of the rank's table; its gradient is sparse."""


@dataclass(frozen=True)
class Operation:
    """Compute a new tensor; ``hook`` puts a hook that is not linear on it."""

    kind: str
    a: int
    b: int
    hook: bool


@dataclass(frozen=True)
class View:
    """A view of a tensor."""

    kind: str
    a: int


@dataclass(frozen=True)
class Change:
    """Change a tensor in place that has just arrived and shares no memory with others of its message."""

    kind: str
    a: int


@dataclass(frozen=True)
class Call:
    """Call a block. A ``relay`` goes by a third rank, ``via``, which answers later (``async_execution``).

    ``changed`` is a tensor to be changed in place as soon as the call has been started.
    """

    mode: str
    dest: int
    block: int
    items: tuple[Item, ...]
    via: int
    no_grad: bool
    changed: int | None


@dataclass(frozen=True)
class Method:
    """Call a method of an RRef's value, with a tensor."""

    mode: str
    rref: int
    a: int


@dataclass(frozen=True)
class Take:
    """Wait for a call and take its results."""

    call: int


@dataclass(frozen=True)
class Share:
    """Make an RRef to tensors of this rank."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Fetch an RRef's value."""

    rref: int


Step = Leaf | Lookup | Operation | View | Change | Call | Method | Take | Share | Fetch


@dataclass(frozen=True)
class Block:
    """What one call does at one rank."""

    rank: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    late: tuple[int, ...]
    """Calls to wait for after the backward passes; the others not taken are forgotten."""


@dataclass(frozen=True)
class Pass:
    """A backward pass from tensors of the phase's frame, or at the owner of one of its RRefs."""

    values: tuple[int, ...]
    rref: int | None
    retain_graph: bool


@dataclass(frozen=True)
class Phase:
    """Forward, then groups of passes; the passes of a group run at the same time."""

    block: int
    groups: tuple[tuple[Pass, ...], ...]


@dataclass(frozen=True)
class Strand:
    """One autograd context."""

    driver: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Program:
    """What a seed means on ``size`` ranks; tensors are ``(side, side)``."""

    seed: int
    size: int
    side: int
    blocks: tuple[Block, ...]
    strands: tuple[Strand, ...]
    failing: tuple[int, int] | None
    """Block and place of an operation whose backward raises: in one of ten programs."""


def options_of(seed: int) -> dict[str, int]:
    """Options of the group that runs this program."""
    return BLOCK_OPTIONS[seed // SEEDS_PER_GROUP % len(BLOCK_OPTIONS)]


@functools.lru_cache(maxsize=64)
def write_program(seed: int, size: int) -> Program:
    """Make the program of a seed."""
    return _ProgramWriter(seed, size).write()


class _ProgramWriter:
    """Draws a program. ``blocks`` grows; a block comes after those it calls."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self.rng = random.Random(seed)
        self.side = 96 if self.rng.random() < 0.05 else 2
        self.forgets = self.rng.random() < 0.15
        self.copies_at_once = self.side == 2 and not options_of(seed)
        self.blocks: list[Block] = []
        self.num_calls = 0  # still allowed

    def write(self) -> Program:
        strands = tuple(self._strand() for _ in range(self.rng.choice([1, 1, 1, 2, 3])))
        failing = self._failing() if self.seed % 10 == 9 else None
        return Program(self.seed, self.size, self.side, tuple(self.blocks), strands, failing)

    def _failing(self) -> tuple[int, int] | None:
        places = [
            (number, place)
            for number, block in enumerate(self.blocks)
            for place, step in enumerate(block.steps)
            if isinstance(step, Operation)
        ]
        return self.rng.choice(places) if places else None

    def _strand(self) -> Strand:
        driver = 0 if self.rng.random() < 0.6 else self.rng.randrange(self.size)
        return Strand(driver, tuple(self._phase(driver) for _ in range(self.rng.choice([1, 1, 1, 2]))))

    def _phase(self, driver: int) -> Phase:
        self.num_calls = self.rng.randint(2, 12)
        writer = _BlockWriter(self, driver, 0, (), depth=0)
        block = writer.write()
        return Phase(block, self._groups(writer))

    def _groups(self, frame: _BlockWriter) -> tuple[tuple[Pass, ...], ...]:
        num_groups = self.rng.choice([1, 1, 2, 3])
        groups = []
        for number in range(num_groups):
            num_passes = 2 if self.rng.random() < 0.15 else 1
            retain = number < num_groups - 1 or num_passes > 1 or self.rng.random() < 0.3
            groups.append(tuple(self._pass(frame, retain) for _ in range(num_passes)))
        return tuple(groups)

    def _pass(self, frame: _BlockWriter, retain: bool) -> Pass:
        if frame.rrefs and self.rng.random() < 0.2:
            return Pass((), self.rng.randrange(len(frame.rrefs)), retain)
        return Pass(frame.draw_values(self.rng.randint(1, 4)), None, retain)


class _BlockWriter:
    """Draws one block, and those it calls.

    Args:
        program: The program's writer.
        rank: Where the block runs.
        num_values: Tensors among its arguments.
        rrefs: Number of tensors of each RRef among its arguments.
        depth: Calls around it.
        may_change: The tensors among its arguments are one and the same.
    """

    def __init__(
        self,
        program: _ProgramWriter,
        rank: int,
        num_values: int,
        rrefs: Sequence[int],
        depth: int,
        may_change: bool = False,
    ) -> None:
        self.may_change = may_change
        self.program, self.rng, self.rank, self.depth = program, program.rng, rank, depth
        self.num_values = num_values
        self.rrefs = list(rrefs)
        self.calls: list[int] = []  # number of results
        self.open: list[int] = []  # calls not taken
        self.steps: list[Step] = []

    def write(self) -> int:
        """Return the block's number."""
        if self.may_change and self.num_values:
            self._change()
        if not self.num_values or self.rng.random() < 0.4:
            self._leaf()
        for _ in range(self.rng.randint(1, 9 if self.depth == 0 else 5)):
            self._step()
        late = self._settle()
        results = self.draw_values(self.rng.choice([1, 1, 2, 3]))
        self.program.blocks.append(Block(self.rank, tuple(self.steps), results, late))
        return len(self.program.blocks) - 1

    def draw_values(self, count: int) -> tuple[int, ...]:
        """Draw tensors, later ones rather; the same may come twice."""
        return tuple(
            max(self.rng.randrange(self.num_values), self.rng.randrange(self.num_values))
            for _ in range(count)
        )

    def _add(self, step: Step, num_values: int = 1) -> None:
        self.steps.append(step)
        self.num_values += num_values

    def _step(self) -> None:
        choices = [(self._operation, 4.0), (self._view, 1.0), (self._leaf, 1.0), (self._share, 0.5)]
        if self.program.num_calls > 0 and self.depth < 4:
            choices.append((self._call, 5.0))
        if self.rrefs:
            choices += [(self._fetch, 1.5), (self._method, 1.0)]
        if self.open:
            choices.append((self._take, 2.0))
        self.rng.choices([f for f, _ in choices], [weight for _, weight in choices])[0]()

    def _leaf(self) -> None:
        is_lookup = self.rng.random() < 0.2
        self._add(Lookup() if is_lookup else Leaf(self.rng.randrange(NUM_LEAVES)))

    def _operation(self) -> None:
        a, b = self.draw_values(2)
        self._add(Operation(self.rng.choice(OPERATIONS), a, b, hook=self.rng.random() < 0.1))

    def _view(self) -> None:
        self._add(View(self.rng.choice(VIEWS), *self.draw_values(1)))

    def _share(self) -> None:
        values = self.draw_values(self.rng.randint(1, 2))
        self.steps.append(Share(values))
        self.rrefs.append(len(values))

    def _fetch(self) -> None:
        rref = self.rng.randrange(len(self.rrefs))
        self._add(Fetch(rref), self.rrefs[rref])

    def _take(self) -> None:
        call = self.open.pop(self.rng.randrange(len(self.open)))
        self._add(Take(call), self.calls[call])

    def _change(self) -> None:
        if self.rng.random() < 0.25:
            self.steps.append(Change(self.rng.choice(CHANGES), self.num_values - 1))

    def _method(self) -> None:
        mode = self.rng.choice(["sync", "async", "remote"])
        self.steps.append(Method(mode, self.rng.randrange(len(self.rrefs)), *self.draw_values(1)))
        self._started(mode, 1)

    def _call(self) -> None:
        self.program.num_calls -= 1
        mode = self.rng.choice(["sync", "async", "remote", "sync", "async", "remote", "relay"])
        dest, via = (self.rng.randrange(self.program.size) for _ in range(2))
        changed = None
        if self.rng.random() < 0.1 and (mode == "sync" or self.program.copies_at_once):
            self._add(Operation("fresh", *self.draw_values(2), hook=False))
            changed = self.num_values - 1
        items = self._items(changed)
        sizes = [self.rrefs[item.index] for item in items if item.is_rref]
        may_change = len({item.index for item in items if not item.is_rref}) == 1
        num_values = len(items) - len(sizes)
        callee = _BlockWriter(self.program, dest, num_values, sizes, self.depth + 1, may_change)
        block = callee.write()
        no_grad = self.rng.random() < 0.05
        self.steps.append(Call(mode, dest, block, items, via, no_grad, changed))
        self._started(mode, len(self.program.blocks[block].results))

    def _items(self, changed: int | None) -> tuple[Item, ...]:
        items = [Item(False, value) for value in self.draw_values(self.rng.randint(0, 3))]
        if self.rrefs:
            items += [
                Item(True, self.rng.randrange(len(self.rrefs))) for _ in range(self.rng.choice([0, 1, 1, 2]))
            ]
        if changed is not None:
            items.append(Item(False, changed))
        self.rng.shuffle(items)
        return tuple(items)

    def _started(self, mode: str, num_results: int) -> None:
        """Note the call; take its results now, as ``rpc_sync`` must, or leave it open."""
        call = len(self.calls)
        self.calls.append(num_results)
        if mode == "remote":
            self.rrefs.append(num_results)
        if mode == "sync" or self.rng.random() < 0.3:
            self._add(Take(call), num_results)
            if num_results == 1 and mode != "remote":
                self._change()
        else:
            self.open.append(call)

    def _settle(self) -> tuple[int, ...]:
        """Take most open calls; return those to be taken after the backward passes."""
        late = []
        while self.open:
            fate = self.rng.random()
            if fate < 0.25 and self.program.forgets:
                self.open.pop()
            elif fate < 0.5 and self.depth == 0:
                late.append(self.open.pop())
            else:
                self._take()
        return tuple(late)
