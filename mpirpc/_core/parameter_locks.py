"""Locks over parameters, for whoever lets ``.grad`` be something else for a while: optimizers, leaf hooks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, slots=True)
class _Guard:
    """A lock over parameters, and its place in the order in which locks are taken."""

    serial: int
    lock: Lock = field(default_factory=Lock, compare=False)


class ParameterLocks:
    """Which lock guards which parameter of this process: each has its own.

    None is shared: who holds the locks of DDP's parameters waits for other workers, which may need others
    here.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        # Parameter -> _Guard; an entry lives as long as its parameter. Changed under _mutex.
        self._guards: Any = WeakTensorKeyDictionary()
        self._mutex = Lock()  # guards _guards; held for look-ups only

    def of(self, parameters: Iterable[Tensor]) -> list[Lock]:
        """Return the locks that guard these parameters, in the order in which they must be taken."""
        with self._mutex:
            found = {self._guard(parameter) for parameter in parameters}
        return [guard.lock for guard in sorted(found, key=lambda guard: guard.serial)]

    def _guard(self, parameter: Tensor) -> _Guard:
        guard: _Guard | None = self._guards.get(parameter)
        if guard is None:
            guard = self._guards[parameter] = _Guard(next(self._serials))
        return guard

    @contextmanager
    def held(self, locks: Iterable[Lock]) -> Iterator[None]:
        """Hold locks that :meth:`of` returned."""
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            yield


PARAMETER_LOCKS = ParameterLocks()
"""Of the process and not of a runtime: a parameter may outlive ``shutdown``, and never has two owners."""
