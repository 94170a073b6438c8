"""Time inside mpirpc: deadlines instead of durations, and one way to wait.

A timeout given by a user becomes a :class:`Deadline` once, at the border; only deadlines travel inside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

UNLIMITED = float("inf")
"""A deadline that never passes."""

monotonic = time.monotonic
"""The clock of all deadlines."""


def deadline_after(timeout: float) -> float:
    """Turn a timeout in seconds into a point on the monotonic clock; 0 means no limit, as in torch."""
    return monotonic() + timeout if timeout > 0 else UNLIMITED


class GilWait:
    """Measures how long a thread waits for Python's interpreter lock, each time it has let others run."""

    __slots__ = ("_count", "_seconds")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0

    def give_way(self) -> None:
        """Let others run: the lock is given up, and must be got back."""
        begun = time.perf_counter()
        os.sched_yield()
        self._seconds += time.perf_counter() - begun
        self._count += 1

    @property
    def average_us(self) -> float:
        """Average wait so far, in us: about 1 where nobody else wants the lock."""
        return 1e6 * self._seconds / max(1, self._count)


class Backoff:
    """How a polling thread passes the time between two looks at the network.

    Right after the last event it gives its core to others without sleeping (``sched_yield``: 1 us, where
    ``time.sleep(0)`` costs 77 us on CPython 3.11). After ``spin`` seconds it sleeps a fraction of the time
    already waited, so that the extra latency stays in proportion.
    """

    __slots__ = ("_since", "give_way", "spin")

    FRACTION = 16
    """A sleep lasts 1/16 of the time waited so far: at most 6 % added to any wait."""

    def __init__(self, spin: float, since: float = 0.0) -> None:
        self.spin = spin
        self.give_way: Callable[[], None] = os.sched_yield
        self._since = since  # 0: from the next pause on

    def pause(self, now: float, sleep: Callable[[float], bool], longest: float) -> None:
        """Let others run, or sleep, according to how long nothing has happened.

        Args:
            now: The present, by :data:`monotonic`.
            sleep: Called with seconds to sleep; says whether something woke it earlier, which begins the wait
                anew.
            longest: Limit of a sleep, in seconds.
        """
        if not self._since:
            self._since = now
        waited = now - self._since
        if waited < self.spin:
            self.give_way()
        elif sleep(min(longest, waited / self.FRACTION)):
            self._since = 0.0
