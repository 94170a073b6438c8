"""Runs the programs of ``autograd_programs`` over RPC and in one process, and compares all gradients.

Both runs carry out the same steps; they differ in their *network*: how a call is made and what an RRef is. In
one process a message is a copy of its tensors through which gradients flow.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError
from tests.mpi import autograd_programs as p
from tests.mpi.autograd_operations import OPERATIONS, VIEWS, BackwardFails, as_real, change, fail, hook

TOLERANCE = 1e-6
SETTLE = 10.0
"""Seconds that contexts may take to go after they were left."""

MUST_BE_ZERO = ("autograd_contexts", "autograd_passes", "autograd_sends", "autograd_recvs", "pending_calls")

Name = tuple[int, int]
"""Seed and number of ranks: what a program is known by on every rank."""


# --- tensors ---


def make_leaf(rank: int, index: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    rows = side if index < p.NUM_LEAVES else 4
    return torch.randn((rows, side), dtype=torch.float64, generator=generator).requires_grad_()


def my_leaves(side: int) -> list[torch.Tensor]:
    """This rank's parameters, the same objects for all programs."""
    with _making_leaves:
        return _make_leaves(rpc.get_worker_info().id, side)


_making_leaves = threading.Lock()  # a cache alone may call its function twice


@functools.cache
def _make_leaves(rank: int, side: int) -> list[torch.Tensor]:
    return [make_leaf(rank, index, side) for index in range(p.NUM_LEAVES + 1)]


class Results:
    """What a block returns: tensors, with a method to call by RPC."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def weigh(self, x: torch.Tensor) -> Results:
        return Results([sum(as_real(tensor) for tensor in self.tensors) * as_real(x).tanh()])


def make_roots(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    roots = [as_real(tensor).mean() for tensor in tensors]
    return [root for root in roots if root.requires_grad]


# --- the two networks ---


@dataclass
class Handle:
    """A call that was started."""

    take: Callable[[], Results]
    rref: Any = None


class Rpc:
    """Calls through the public API."""

    def __init__(self, program: p.Program) -> None:
        self.program = program
        self.leaves = my_leaves(program.side)

    def leaf(self, rank: int, index: int) -> torch.Tensor:
        return self.leaves[index]

    def watch(self, made: torch.Tensor) -> None:
        """Take the program's failing operation."""
        made.register_hook(fail)

    def share(self, rank: int, results: Results) -> Any:
        return rpc.RRef(results)

    def fetch(self, rank: int, rref: Any) -> Results:
        return rref.to_here()

    def call(self, rank: int, step: p.Call, items: list[Any]) -> Handle:
        args = ((self.program.seed, self.program.size), step.block, items)
        if step.mode == "sync":
            results = rpc.rpc_sync(step.dest, run_block, args=args)
            return Handle(lambda: results)
        if step.mode == "async":
            return Handle(rpc.rpc_async(step.dest, run_block, args=args).wait)
        if step.mode == "relay":
            return Handle(rpc.rpc_async(step.via, relay, args=(step.dest, *args)).wait)
        rref = rpc.remote(step.dest, run_block, args=args)
        return Handle(rref.to_here, rref)

    def method(self, rank: int, mode: str, rref: Any, x: torch.Tensor) -> Handle:
        if mode == "sync":
            results = rref.rpc_sync().weigh(x)
            return Handle(lambda: results)
        if mode == "async":
            return Handle(rref.rpc_async().weigh(x).wait)
        made = rref.remote().weigh(x)
        return Handle(made.to_here, made)


@dataclass
class LocalRRef:
    owner: int
    results: Results


class OneProcess:
    """Calls run at once; a message is a copy."""

    def __init__(self, program: p.Program) -> None:
        self.program = program
        self.leaves = {
            (rank, index): make_leaf(rank, index, program.side)
            for rank in range(program.size)
            for index in range(p.NUM_LEAVES + 1)
        }
        self.must_fail = False

    def watch(self, made: torch.Tensor) -> None:
        made.register_hook(lambda _: setattr(self, "must_fail", True))

    def leaf(self, rank: int, index: int) -> torch.Tensor:
        return self.leaves[rank, index]

    def share(self, rank: int, results: Results) -> LocalRRef:
        return LocalRRef(rank, results)

    def fetch(self, rank: int, rref: LocalRRef) -> Results:
        return rref.results if rank == rref.owner else Results(copied(rref.results.tensors))

    def call(self, rank: int, step: p.Call, items: list[Any]) -> Handle:
        items = copied(items)
        with torch.enable_grad():
            if step.mode == "relay":
                items = copied(items)
            results = Frame(self.program, step.block, items, self).run()
            if step.mode == "relay":
                results = twice(Results(copied(results.tensors)))
            return self._handle(rank, step.mode, step.dest, results)

    def method(self, rank: int, mode: str, rref: LocalRRef, x: torch.Tensor) -> Handle:
        return self._handle(rank, mode, rref.owner, rref.results.weigh(*copied([x])))

    def _handle(self, rank: int, mode: str, owner: int, results: Results) -> Handle:
        if mode == "remote":
            rref = LocalRRef(owner, results)
            return Handle(lambda: self.fetch(rank, rref), rref)
        arrived = Results(copied(results.tensors))
        return Handle(lambda: arrived)


def copied(items: Sequence[Any]) -> list[Any]:
    """What arrives of a message: one copy of each tensor, RRefs as they are."""
    copies = {id(item): copy_of(item) for item in items}
    return [copies[id(item)] for item in items]


def copy_of(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    if item.requires_grad and not torch.is_grad_enabled():
        return clone(item.detach()).requires_grad_()
    return clone(item)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Clone; what was expanded stays so, as in a message."""
    whole = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            whole = whole.narrow(dim, 0, 1)
    return whole.clone().expand_as(tensor) if whole is not tensor else tensor.clone()


# --- forward ---


class Frame:
    """A block being run: its tensors, RRefs and calls by number."""

    def __init__(
        self, program: p.Program, number: int, items: Sequence[Any], network: Rpc | OneProcess
    ) -> None:
        self.block = program.blocks[number]
        self.failing = program.failing[1] if program.failing and program.failing[0] == number else None
        self.network = network
        self.values = [item for item in items if isinstance(item, torch.Tensor)]
        self.rrefs = [item for item in items if not isinstance(item, torch.Tensor)]
        self.handles: list[Handle] = []

    def run(self) -> Results:
        for place, step in enumerate(self.block.steps):
            getattr(self, type(step).__name__.lower())(step)
            if place == self.failing and self.values[-1].requires_grad and not self.values[-1].is_leaf:
                self.network.watch(self.values[-1])
        return Results([self.values[index] for index in self.block.results])

    def leaf(self, step: p.Leaf) -> None:
        self.values.append(self.network.leaf(self.block.rank, step.index))

    def lookup(self, step: p.Lookup) -> None:
        table = self.network.leaf(self.block.rank, p.NUM_LEAVES)
        rows = torch.arange(table.shape[1]) * 3 % 4
        self.values.append(functional.embedding(rows, table, sparse=True))

    def operation(self, step: p.Operation) -> None:
        made = OPERATIONS[step.kind](as_real(self.values[step.a]), as_real(self.values[step.b]))
        if step.hook and made.requires_grad and not made.is_leaf and not made.is_complex():
            made.register_hook(hook)
        self.values.append(made)

    def view(self, step: p.View) -> None:
        self.values.append(VIEWS[step.kind](self.values[step.a]))

    def change(self, step: p.Change) -> None:
        change(step.kind, self.values[step.a])

    def call(self, step: p.Call) -> None:
        items = [self.rrefs[item.index] if item.is_rref else self.values[item.index] for item in step.items]
        with torch.no_grad() if step.no_grad else nullcontext():
            self._started(self.network.call(self.block.rank, step, items))
        if step.changed is not None:
            self.values[step.changed].mul_(1.5)

    def method(self, step: p.Method) -> None:
        rref, x = self.rrefs[step.rref], self.values[step.a]
        self._started(self.network.method(self.block.rank, step.mode, rref, x))

    def take(self, step: p.Take) -> None:
        self.values += self.handles[step.call].take().tensors

    def share(self, step: p.Share) -> None:
        results = Results([self.values[index] for index in step.values])
        self.rrefs.append(self.network.share(self.block.rank, results))

    def fetch(self, step: p.Fetch) -> None:
        self.values += self.network.fetch(self.block.rank, self.rrefs[step.rref]).tensors

    def _started(self, handle: Handle) -> None:
        self.handles.append(handle)
        if handle.rref is not None:
            self.rrefs.append(handle.rref)


def run_block(name: Name, number: int, items: list[Any]) -> Results:
    """Called by RPC."""
    program = p.write_program(*name)
    return Frame(program, number, items, Rpc(program)).run()


@rpc.functions.async_execution
def relay(dest: int, name: Name, number: int, items: list[Any]) -> torch.futures.Future[Results]:
    """Called by RPC: have another rank run the block, and answer when it has."""
    return rpc.rpc_async(dest, run_block, args=(name, number, items)).then(lambda done: twice(done.value()))


def twice(results: Results) -> Results:
    return Results([as_real(tensor) * 2 for tensor in results.tensors])


# --- backward ---


def run_strand(name: Name, number: int) -> None:
    """Run a strand both ways and compare; called at its driver, by RPC at times.

    Raises:
        AssertionError: A gradient differs, or a pass that must fail does not, or fails otherwise.
    """
    program = p.write_program(*name)
    expected, must_fail = gradients_of_one_process(program, program.strands[number])
    if must_fail:
        with pytest.raises((BackwardFails, AutogradError), match="this backward fails"):
            gradients_over_rpc(program, number)
    else:
        compare(gradients_over_rpc(program, number), expected)


def gradients_over_rpc(program: p.Program, number: int) -> list[list[torch.Tensor | None]]:
    """Per rank and leaf: the gradient.

    Raises:
        BackwardFails: As the program has it.
        AutogradError: The same, at another worker.
    """
    with ThreadPoolExecutor() as others, autograd.context() as context_id:
        for phase in program.strands[number].phases:
            run_phase(program, phase, context_id, others)
        # by another thread: not part of the context, so its end must find all its workers by itself
        return others.submit(collect_all, program, context_id).result()


def run_phase(program: p.Program, phase: p.Phase, context_id: int, others: ThreadPoolExecutor) -> None:
    frame = Frame(program, phase.block, (), Rpc(program))
    frame.run()
    for first, *more in phase.groups:
        futures = [others.submit(run_pass, frame, one, context_id) for one in more]
        run_pass(frame, first, context_id)
        for future in futures:
            future.result()
    for call in frame.block.late:
        frame.handles[call].take()


def run_pass(frame: Frame, one: p.Pass, context_id: int) -> None:
    if one.rref is not None:
        rref = frame.rrefs[one.rref]
        rpc.rpc_sync(rref.owner(), backward_there, args=(rref, context_id, one.retain_graph))
    elif roots := make_roots([frame.values[index] for index in one.values]):
        autograd.backward(context_id, roots, retain_graph=one.retain_graph)


def backward_there(rref: Any, context_id: int, retain_graph: bool) -> None:
    """Called by RPC at the owner."""
    if roots := make_roots(rref.local_value().tensors):
        autograd.backward(context_id, roots, retain_graph=retain_graph)


def gradients_of_one_process(
    program: p.Program, strand: p.Strand
) -> tuple[list[list[torch.Tensor | None]], bool]:
    """Per rank and leaf: the gradient; and whether a pass gets to the operation that fails."""
    network = OneProcess(program)
    leaves = list(network.leaves.values())
    sums: list[torch.Tensor | None] = [None] * len(leaves)
    for phase in strand.phases:
        frame = Frame(program, phase.block, (), network)
        frame.run()
        for one in [one for group in phase.groups for one in group]:
            if one.rref is not None:
                roots = make_roots(frame.rrefs[one.rref].results.tensors)
            else:
                roots = make_roots([frame.values[index] for index in one.values])
            if roots:
                found = torch.autograd.grad(roots, leaves, retain_graph=True, allow_unused=True)
                if program.failing:  # everything is run, also what leads to no leaf of ours
                    torch.autograd.backward(roots, retain_graph=True)
                sums = [add(a, b) for a, b in zip(sums, found, strict=True)]
    dense = [None if g is None else g.to_dense() for g in sums]
    count = p.NUM_LEAVES + 1
    by_rank = [dense[rank * count : (rank + 1) * count] for rank in range(program.size)]
    return by_rank, network.must_fail


def add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def collect_all(program: p.Program, context_id: int) -> list[list[torch.Tensor | None]]:
    futures = [rpc.rpc_async(r, collect, args=(context_id, program.side)) for r in range(program.size)]
    return [future.wait() for future in futures]


def collect(context_id: int, side: int) -> list[torch.Tensor | None]:
    """Called by RPC: this rank's gradients in the context."""
    leaves = my_leaves(side)
    assert all(leaf.grad is None for leaf in leaves), "a backward pass wrote to .grad"
    try:
        found = autograd.get_gradients(context_id)
    except AutogradError:  # the context never came here
        return [None] * len(leaves)
    return [found[leaf].to_dense() if leaf in found else None for leaf in leaves]


def compare(found: list[list[torch.Tensor | None]], expected: list[list[torch.Tensor | None]]) -> None:
    for rank, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        for index, (got, wanted) in enumerate(zip(mine, reference, strict=True)):
            place = f"leaf {index} of rank {rank}"
            if wanted is None or got is None:
                assert got is wanted is None, f"{place}: got {got}, one process gives {wanted}"
            else:
                difference = ((got - wanted).abs() / wanted.abs().clamp(min=1)).max().item()
                assert difference <= TOLERANCE, f"{place}: differs by {difference}: {got}, not {wanted}"


# --- a program ---


def run_program(seed: int, size: int) -> None:
    """Run a program and compare; called at rank 0.

    Raises:
        AssertionError: A gradient differs, or something is left behind.
    """
    strands = p.write_program(seed, size).strands
    jobs = [functools.partial(start_strand, (seed, size), i, s.driver) for i, s in enumerate(strands)]
    if len(jobs) == 1:
        jobs[0]()
    else:
        with ThreadPoolExecutor(len(jobs)) as threads:
            for future in [threads.submit(job) for job in jobs]:
                future.result()
    wait_until_empty(size)


def start_strand(name: Name, number: int, driver: int) -> None:
    if driver == 0:
        run_strand(name, number)
    else:
        rpc.rpc_sync(driver, run_strand, args=(name, number))


def wait_until_empty(size: int) -> None:
    """Look until every rank has come to rest, twice in a row: calls that were forgotten may make others."""
    deadline = time.monotonic() + SETTLE
    num_clean = 0
    while num_clean < 2:
        left = {f"rank {rank}": found for rank in range(size) if (found := rpc.rpc_sync(rank, remains))}
        num_clean = 0 if left else num_clean + 1
        assert not left or time.monotonic() < deadline, f"left behind: {left}"


def remains() -> dict[str, int]:
    """Called by RPC by rank 0: what is left here, this call not counted."""
    info = rpc.debug_info()
    is_caller = rpc.get_worker_info().id == 0
    found = {name: info[name] for name in MUST_BE_ZERO}
    found["pending_calls"] -= is_caller
    found["open_calls"] = info["open_calls"] - 1
    return {name: count for name, count in found.items() if count}
