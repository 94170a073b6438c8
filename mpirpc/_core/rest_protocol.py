"""When all workers that live are at rest, where workers may die: reports in, a verdict out.

Where none may die, one sum over all workers says it (``Runtime._come_to_rest``). A collective operation
breaks with the first death, on some workers and not on others, so here each worker sends its numbers to every
other one, and whoever sees from them that all are at rest tells the others, which believe it and tell it on.

Guarantees (``docs/design/failure.md``):
    F4: if one living worker finds all at rest, every living worker comes to know.
    F5: it is true: numbers count together only if their senders know the same workers to be dead.

Words: a *phase* is one coming to rest, counted alike on all workers. A *view* is the set of workers known to
be dead. A *number* counts the reports of one view in one phase.

Pure. Thread: any, one at a time (the caller's lock).   Progress: never blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from mpirpc._core.messages import RestReport


def view_of(lost: Iterable[int]) -> int:
    """Return the number that names a set of dead workers on the wire."""
    ranks = sorted(lost)
    return len(ranks) << 32 | zlib.crc32(",".join(map(str, ranks)).encode())


class RestTable:
    """What one worker knows of the others' rest.

    Args:
        world_size: Number of workers, the dead ones included.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.phase = 0  # the one this worker is in, or was in last; begin() counts
        self._known = 0  # the last phase whose end is known; judge() and on_at_rest() move it on
        # (phase, view, number) -> source -> what it reported; add() puts in, begin() drops old phases
        self._reports: dict[tuple[int, int, int], dict[int, RestReport]] = {}

    def begin(self) -> None:
        """Enter the next phase."""
        self.phase += 1
        self._reports = {key: found for key, found in self._reports.items() if key[0] >= self.phase}

    def add(self, source: int, report: RestReport) -> None:
        """Take a report, of this worker or another. One that is too late or too early does no harm."""
        if report.phase >= self.phase:
            key = report.phase, report.view, report.number
            self._reports.setdefault(key, {})[source] = report

    def on_at_rest(self, phase: int) -> None:
        """Another worker found all at rest."""
        self._known = max(self._known, phase)

    @property
    def is_over(self) -> bool:
        """Whether all workers are known to be at rest in this phase."""
        return self._known >= self.phase

    def is_complete(self, lost: Iterable[int], number: int) -> bool:
        """Tell whether every living worker has given this report."""
        gone = set(lost)
        found = self._reports.get((self.phase, view_of(gone), number), {})
        return all(rank in found for rank in range(self._world_size) if rank not in gone)

    def judge(self, lost: Iterable[int], number: int) -> bool:
        """Look at a complete report and the one before it: are all at rest?

        Twice the same sums with nobody busy and as many received as sent: nothing happened in between, and
        nothing can happen any more (Mattern's four counters).
        """
        gone = set(lost)
        sums = self._sums(gone, number)
        if self._sums(gone, number - 1) == sums and sums[0] == sums[1] and sums[2] == 0:
            self._known = max(self._known, self.phase)
        return self.is_over

    def _sums(self, gone: set[int], number: int) -> tuple[int, int, int]:
        found = self._reports.get((self.phase, view_of(gone), number), {})
        living = [report for rank, report in found.items() if rank not in gone]
        return (
            sum(report.num_sent for report in living),
            sum(report.num_received for report in living),
            sum(report.is_busy for report in living) if living else 1,
        )

    def __repr__(self) -> str:
        return f"<RestTable phase={self.phase} over={self.is_over} reports={len(self._reports)}>"
