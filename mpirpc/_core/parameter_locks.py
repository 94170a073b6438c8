"""Locks over parameters, for whoever lets ``.grad`` be something else for a while: optimizers, leaf hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class ParameterLocks:
    """Which lock guards which parameter of this process: each has its own.

    None is shared, nor held while another is waited for: who holds the locks of DDP's parameters waits for
    other workers, which may need others here.
    """

    def __init__(self) -> None:
        # Parameter -> Lock; an entry lives as long as its parameter. Changed under _mutex.
        self._locks: Any = WeakTensorKeyDictionary()
        self._mutex = Lock()  # guards _locks; held for look-ups only

    def of(self, parameters: Iterable[Tensor]) -> list[Lock]:
        """Return the locks that guard these parameters, in an order that is the same for all callers."""
        with self._mutex:
            found: set[Lock] = {self._locks.setdefault(parameter, Lock()) for parameter in parameters}
        return sorted(found, key=id)

    @contextmanager
    def held(self, locks: Sequence[Lock]) -> Iterator[None]:
        """Hold locks that :meth:`of` returned."""
        taken: list[Lock] = []  # Ctrl-C may strike at any step
        try:
            while (busy := _take_all(locks, taken)) is not None:
                with busy:  # wait until it is free
                    pass
            yield
        finally:
            _release(taken)


def _take_all(locks: Sequence[Lock], taken: list[Lock]) -> Lock | None:
    """Take all locks, or none; return the one that could not be had."""
    for lock in locks:
        if not lock.acquire(blocking=False):
            _release(taken)
            return lock
        taken.append(lock)
    return None


def _release(taken: list[Lock]) -> None:
    while taken:
        taken.pop().release()


PARAMETER_LOCKS = ParameterLocks()
"""Of the process and not of a runtime: a parameter may outlive ``shutdown``, and never has two owners."""
