"""How ``bench`` takes its figures: sides by turns in small blocks, so that drift hits all alike.

A *block* is some repeats of one measurement on one side. Every side gets the same time, not the same number
of repeats; in each round the side that begins is another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mpirpc as rpc
from mpirpc.cli import bench_work
from mpirpc.cli.bench_peers import PeerError, Side
from mpirpc.cli.bench_rows import OURS, Result, Row, Summary
from mpirpc.cli.bench_work import Series

COUNTED = 10
"""Operations over which messages and bytes are counted."""

SETTLE = 0.05
"""Seconds after which control messages that follow an operation (deleted RRefs) have come."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: ``rounds`` blocks a side, of about ``block_time`` seconds each."""

    rounds: int
    block_time: float


QUICK = Plan(rounds=2, block_time=0.02)
FULL = Plan(rounds=10, block_time=0.15)


def measure_rows(
    rows: Sequence[Row], sides: Sequence[Side], plan: Plan, tell: Callable[[str, str], None]
) -> dict[str, Result]:
    """Measure all rows; rows of one measurement together.

    Args:
        rows: In the order of the result.
        sides: mpirpc first.
        plan: How much.
        tell: Called with each row's name, and what is done for it.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    results = {row.name: Result() for row in rows}
    for group in groups.values():
        _measure_group(group, sides, plan, results, tell)
        for row in group:
            tell(row.name, "")
    return results


def _measure_group(
    group: Sequence[Row],
    sides: Sequence[Side],
    plan: Plan,
    results: Mapping[str, Result],
    tell: Callable[[str, str], None],
) -> None:
    row = group[0]
    samples = _measure_by_turns(row, [side for side in sides if side.can(row.work)], plan, results, tell)
    for member in group:
        result = results[member.name]
        result.failures |= results[row.name].failures
        for side, series in samples.items():
            if series.get(member.series):
                result.sides[side] = Summary.of(series[member.series])
        if member.counted and OURS in result.sides:
            result.messages, result.nbytes = count_traffic(member)


def _measure_by_turns(
    row: Row,
    sides: Sequence[Side],
    plan: Plan,
    results: Mapping[str, Result],
    tell: Callable[[str, str], None],
) -> dict[str, Series]:
    """Return each side's samples. A side that fails is left out from then on, and its failure noted."""
    rounds = row.rounds if row.rounds is not None and plan is not QUICK else plan.rounds
    counts: dict[str, int] = {}
    samples: dict[str, Series] = {}
    failures = results[row.name].failures
    for number in range(rounds):
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            if side.name in failures:
                continue
            tell(row.name, f"{side.name}, block {number + 1} of {rounds}")
            try:
                with side.awake():
                    if side.name not in counts:
                        counts[side.name] = _find_count(row, side, plan)
                    block = side.measure(row.work, row.parameters_for(side.name), counts[side.name], row.warm)
            except Exception as error:
                failures[side.name] = _last_line(error)
                samples.pop(side.name, None)
                continue
            _extend(samples.setdefault(side.name, {}), block)
    return samples


def _find_count(row: Row, side: Side, plan: Plan) -> int:
    """How many repeats fill a block.

    More and more are tried, until what each block has once (threads to start, warming up) weighs little.
    """
    if row.most == 1:
        return 1
    count = 1
    while True:
        start = time.perf_counter()
        side.measure(row.work, row.parameters_for(side.name), count, row.warm)
        in_a_block = count * plan.block_time / (time.perf_counter() - start)
        if in_a_block < 2 * count or count >= row.most:
            return max(2, min(row.most, int(in_a_block)))
        count = max(2 * count, int(in_a_block / 2))


def _extend(series: Series, more: Series) -> None:
    for name, samples in more.items():
        series.setdefault(name, []).extend(samples)


def _last_line(error: Exception) -> str:
    """The line that says what happened; a peer's failure is a whole traceback."""
    text = str(error).strip() if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[-1] if isinstance(error, PeerError) else text


def count_traffic(row: Row) -> tuple[float, float]:
    """Count our MPI messages and bytes per operation, sent and received here, rank 0."""
    bench_work.measure(row.work, row.parameters, 1, 1)
    before = _settled_traffic()
    bench_work.measure(row.work, row.parameters, COUNTED, 0)
    after = _settled_traffic()
    messages, nbytes = ((b - a) / COUNTED for a, b in zip(before, after, strict=True))
    return messages, nbytes


def _settled_traffic() -> tuple[int, int]:
    time.sleep(SETTLE)
    info = rpc.debug_info()
    return (
        info["messages_sent"] + info["messages_received"],
        info["bytes_sent"] + info["bytes_received"],
    )
