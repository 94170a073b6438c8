"""End a job whose ranks are stuck, and show where.

Two nets: a thread that names the rank, shows all stacks and calls MPI_Abort; behind it the C timer of
``faulthandler``, which needs no interpreter lock, for a rank that is stuck with the lock held.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from typing import TextIO

GRACE = 2.0
"""Seconds between a rank's stacks and the end of the job, so that the other ranks can show theirs."""

LAST_RESORT = 5.0
"""Seconds after the patience is over when the C timer ends the process."""


class Watchdog:
    """Watches one thing at a time: ``watch`` it, and ``rest`` when it is over.

    Args:
        err: Where to write; not the standard error that pytest captures.
        describe: Returns a line with the rank and what it is doing just now.
        abort: Ends the whole job.
    """

    def __init__(self, err: TextIO, describe: Callable[[], str], abort: Callable[[], None]) -> None:
        self._err = err
        self._describe = describe
        self._abort = abort
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._patience = 0.0
        threading.Thread(target=self._run, name="tests-watchdog", daemon=True).start()

    def watch(self, patience: float) -> None:
        """Bark unless ``rest`` or another ``watch`` comes within ``patience`` seconds."""
        self._set(time.monotonic() + patience, patience)
        faulthandler.dump_traceback_later(patience + LAST_RESORT, exit=True, file=self._err)

    def rest(self) -> None:
        """Stop watching."""
        self._set(None, 0.0)
        faulthandler.cancel_dump_traceback_later()

    def _set(self, deadline: float | None, patience: float) -> None:
        with self._changed:
            self._deadline, self._patience = deadline, patience
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._deadline is None or self._deadline > time.monotonic():
                left = None if self._deadline is None else self._deadline - time.monotonic()
                self._changed.wait(left)
        self._bark()

    def _bark(self) -> None:
        print(f"\n{self._describe()}: over {self._patience:g} s, ending the job", file=self._err, flush=True)
        faulthandler.dump_traceback(file=self._err, all_threads=True)
        self._err.flush()
        time.sleep(GRACE)
        self._abort()
