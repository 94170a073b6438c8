"""``Waiter``: what a thread waits for, done or not, with a place where it sleeps until it is woken."""

from __future__ import annotations

import threading

from mpirpc._core.transport import Bell

SHORT_SLEEP = 5e-4
"""Sleeps below this, in seconds, are over before a bell would be of use."""


class Waiter:
    """Something a thread waits for: done or not, with a place to park.

    The place is a lock that is taken, made by the first thread that parks: most waiters are done before.

    Thread: ``set`` any; ``park`` one thread at a time, or all but one may sleep on until their timeouts.
    """

    __slots__ = ("_bell", "_is_woken", "_parking", "done")

    def __init__(self) -> None:
        self.done = False
        self._is_woken = False  # whether it was woken so far
        self._parking: threading.Lock | None = None
        self._bell: Bell | None = None  # beside which the parked thread sleeps

    def set(self) -> None:
        """Say that it is done and wake who waits."""
        self.done = self._is_woken = True
        if self._parking is not None:
            self.unpark()

    def unpark(self) -> None:
        """Wake the parked thread, or make its next ``park`` return at once."""
        self._is_woken = True  # first: whoever makes the lock looks at this after
        parking = self._parking
        if parking is None:
            return
        try:
            parking.release()
        except RuntimeError:  # a wake-up is stored already
            return
        bell = self._bell
        if bell is not None:
            bell.ring_here()

    def rest(self, bell: Bell, timeout: float) -> bool:
        """Sleep until woken, ``bell`` rings or ``timeout`` seconds have passed; say whether woken."""
        if timeout < SHORT_SLEEP:
            return self.park(timeout)
        parking = self._parking or self._make_parking()
        self._bell = bell  # first: who unparks from now on rings as well
        try:
            return parking.acquire(False) or bell.sleep(timeout)
        finally:
            self._bell = None

    def park(self, timeout: float) -> bool:
        """Sleep until woken or ``timeout`` seconds have passed; say whether woken.

        Now and then it returns early for nothing.
        """
        parking = self._parking or self._make_parking()
        return parking.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX)))

    def _make_parking(self) -> threading.Lock:
        parking = threading.Lock()
        parking.acquire()
        self._parking = parking
        if self._is_woken:  # by someone who may not have seen the lock
            self.unpark()
        return parking
