"""The rows of ``bench``: what each is called, how it is measured, and which target it has.

A *result* is what came out for one row: per side, a summary of its samples, all in base units (seconds per
operation, share of a core, bytes, payloads). A target is a function of all results, so that a row may be
compared with another.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
ENOUGH_FOR_P99 = 100
BURST = 1000
NUM_HOPS = 8
SHORT_SWITCH = 1e-4
"""``sys.setswitchinterval`` of the callee, in seconds, in the row that shortens it; Python's own is 5e-3."""

OURS, TORCH, RAW, RAW_FRESH, FUTURES = "mpirpc", "torch", "mpi4py", "fresh", "futures"
SIDES = (OURS, TORCH, RAW, RAW_FRESH, FUTURES)
"""Every name that a column can have, in their order. ``mpi4py`` is ping-pong into reused buffers, ``fresh``
the same into new memory each time; ``futures`` is ``mpi4py.futures``."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The samples of one side of one row. ``p99`` is None with fewer than 100 samples."""

    median: float
    p99: float | None
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarize; there must be samples."""
        p99 = sorted(samples)[math.ceil(0.99 * len(samples)) - 1] if len(samples) >= ENOUGH_FOR_P99 else None
        return cls(statistics.median(samples), p99, len(samples))


@dataclass(slots=True)
class Result:
    """What is known of one row. ``messages`` and ``nbytes`` are per operation, both directions."""

    sides: dict[str, Summary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    messages: float | None = None
    nbytes: float | None = None

    def ratio(self, peer: str) -> float | None:
        """How many times less the row is for us than for the peer: above 1, we are faster."""
        ours, theirs = self.sides.get(OURS), self.sides.get(peer)
        if ours is None or theirs is None or ours.median <= 0:
            return None
        return theirs.median / ours.median


Results = Mapping[str, Result]
Verdict = bool | None
"""Whether a target is met; None if what it needs was not measured."""


@dataclass(frozen=True, slots=True)
class Target:
    """One number to reach: its text, and how it is judged for the row of a given name."""

    text: str
    is_met: Callable[[Results, str], Verdict]


def times_faster(factor: float, peer: str) -> Target:
    """At least so many times faster than a peer; below 1, at least this part of its rate."""

    def is_met(results: Results, row: str) -> Verdict:
        ratio = results[row].ratio(peer)
        return None if ratio is None else ratio >= factor

    return Target(f">= {factor:g}x {peer}", is_met)


def short_tail(factor: float) -> Target:
    """The 99th percentile at most so many medians."""

    def is_met(results: Results, row: str) -> Verdict:
        ours = results[row].sides.get(OURS)
        return None if ours is None or ours.p99 is None else ours.p99 <= factor * ours.median

    return Target(f"p99 <= {factor:g}x p50", is_met)


def at_most(limit: float, text: str) -> Target:
    """The median at most ``limit`` in base units, which ``text`` says for people."""

    def is_met(results: Results, row: str) -> Verdict:
        ours = results[row].sides.get(OURS)
        return None if ours is None else ours.median <= limit

    return Target(f"<= {text}", is_met)


def rate_of_row(share: float, other: str) -> Target:
    """At least this share of our own rate in another row."""

    def is_met(results: Results, row: str) -> Verdict:
        ours, theirs = (
            results[row].sides.get(OURS),
            results[other].sides.get(OURS) if other in results else None,
        )
        return None if ours is None or theirs is None else ours.median <= theirs.median / share

    return Target(f">= {share:g} of '{other}'", is_met)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result.

    Attributes:
        name: As shown and as ``--rows`` selects it.
        work: The measurement in ``bench_work.WORK``.
        parameters: Its parameters; rows with equal work and parameters are measured once.
        peer_parameters: What peers get instead; None for the same.
        series: Which of the measurement's samples the row shows.
        unit: ``s`` for a time, ``1/s`` for a rate of which the samples are times, ``core``, ``B``,
            ``payload``.
        targets: What is to be reached here.
        warm: Repeats before the samples of each block, not counted.
        most: Largest number of repeats in a block.
        rounds: Number of blocks, if not the usual one.
        counted: Messages and bytes per operation are counted.
    """

    name: str
    work: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    peer_parameters: Mapping[str, Any] | None = None
    series: str = "time"
    unit: str = "s"
    targets: tuple[Target, ...] = ()
    warm: int = 3
    most: int = 5000
    rounds: int | None = None
    counted: bool = False

    @property
    def has_ratios(self) -> bool:
        """Speed and load are compared as ratios; memory, which may be none, is not."""
        return self.unit in ("s", "1/s", "core")

    @property
    def key(self) -> str:
        """Equal for rows that come from one measurement."""
        return f"{self.work} {sorted(self.parameters.items())}"

    def parameters_for(self, side: str) -> Mapping[str, Any]:
        """What a side is told."""
        return self.parameters if side == OURS or self.peer_parameters is None else self.peer_parameters


@dataclass(frozen=True, slots=True)
class Scope:
    """What decides which rows there are."""

    num_ranks: int
    max_nbytes: int
    idle: float


def all_rows(scope: Scope) -> list[Row]:
    """Every row, in the order of the result."""
    return [
        *_latency_rows(scope),
        *_size_rows(scope.max_nbytes),
        *_flight_rows(),
        *_feature_rows(scope),
        *_busy_rows(),
        *_idle_rows(scope.idle),
        *_footprint_rows(scope),
        Row("init + shutdown", "cycle", targets=(times_faster(1, TORCH),)),
    ]


def size_text(nbytes: int) -> str:
    """1024 -> ``1 KiB``."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def sizes(max_nbytes: int) -> list[int]:
    """1 KiB, 4 KiB, ... 256 MiB, up to the limit."""
    return [KIB << shift for shift in range(0, 20, 2) if KIB << shift <= max_nbytes]


def _latency_rows(scope: Scope) -> list[Row]:
    crowded = scope.num_ranks >= 4 and scope.num_ranks > len(os.sched_getaffinity(0))
    extra = (at_most(100e-6, "100 us, oversubscribed"),) if crowded else ()
    return [
        Row(
            "no-op",
            "noop",
            targets=(times_faster(10, TORCH), short_tail(4), *extra),
            warm=20,
            counted=True,
        ),
        Row("torch.add", "add", targets=(times_faster(3, TORCH), short_tail(4)), warm=20, counted=True),
    ]


def _size_rows(max_nbytes: int) -> list[Row]:
    targets = {
        MIB: (times_faster(2.5, TORCH), times_faster(0.7, RAW)),
        64 * MIB: (times_faster(1.5, TORCH), times_faster(0.9, RAW_FRESH)),
    }
    rows = []
    for work in ("echo", "one-way"):
        for nbytes in sizes(max_nbytes):
            rows.append(
                Row(
                    f"{work} {size_text(nbytes)}",
                    work,
                    {"nbytes": nbytes},
                    targets=targets.get(nbytes, ()) if work == "echo" else (),
                    warm=10 if nbytes < MIB else 1,
                    counted=True,
                )
            )
    return rows


def _flight_rows() -> list[Row]:
    targets = {16: (rate_of_row(0.8, "1 thread"),)}
    rows = [
        Row(
            f"{num_threads} threads" if num_threads > 1 else "1 thread",
            "threads",
            {"num_threads": num_threads},
            unit="1/s",
            targets=targets.get(num_threads, ()),
            warm=0,
        )
        for num_threads in (1, 4, 16, 64)
    ]
    burst = {"num_calls": BURST}
    return [*rows, Row("1000 async", "burst", burst, unit="1/s", targets=(times_faster(8, TORCH),), warm=1)]


def _feature_rows(scope: Scope) -> list[Row]:
    chain_targets = (times_faster(5, TORCH),) if scope.num_ranks >= 4 else ()
    all_to_all = {"num_calls": 20}
    return [
        Row("remote + to_here", "remote", targets=(times_faster(7, TORCH),), counted=True),
        Row(f"chain of {NUM_HOPS} hops", "chain", {"num_hops": NUM_HOPS}, unit="1/s", targets=chain_targets),
        Row("autograd step", "autograd", targets=(times_faster(5, TORCH),), counted=True),
        Row("optimizer step", "optimizer"),
        Row("all-to-all", "all-to-all", all_to_all, unit="1/s"),
    ]


def _busy_rows() -> list[Row]:
    usual = {"where": "callee", "switch_interval": 0.0}
    short = {"where": "callee", "switch_interval": SHORT_SWITCH}
    return [
        Row("no-op, caller busy", "busy", {"where": "caller", "switch_interval": 0.0}),
        Row("no-op, callee busy", "busy", usual, targets=(times_faster(1, TORCH),)),
        Row(
            f"no-op, callee busy, {SHORT_SWITCH * 1e3:g} ms switches",
            "busy",
            short,
            peer_parameters=usual,
            targets=(times_faster(4, TORCH),),
        ),
    ]


def _idle_rows(seconds: float) -> list[Row]:
    how = {"seconds": seconds}
    return [
        Row(
            "first call after idle", "idle", how, targets=(times_faster(3, TORCH),), warm=0, most=1, rounds=5
        ),
        Row(
            "CPU while idle",
            "idle",
            how,
            series="cpu",
            unit="core",
            targets=(at_most(0.02, "2 % of a core"),),
            warm=0,
            most=1,
            rounds=5,
        ),
    ]


def _footprint_rows(scope: Scope) -> list[Row]:
    nbytes = min(64 * MIB, scope.max_nbytes)
    how = {"nbytes": nbytes}
    limits = nbytes >= 16 * MIB  # below, what the process does besides is as large
    callee = (at_most(1.1, "1 payload"),) if limits else ()
    caller = (at_most(0.1, "0 payloads"),) if limits else ()
    title = f"extra memory, {size_text(nbytes)} echo"
    rows = [
        Row(f"{title}, callee", "memory", how, series="callee", unit="payload", targets=callee, most=1),
        Row(f"{title}, caller", "memory", how, series="caller", unit="payload", targets=caller, most=1),
    ]
    everyone = {"num_calls": 20}
    return [*rows, Row("memory of the largest rank", "all-to-all", everyone, series="resident", unit="B")]
