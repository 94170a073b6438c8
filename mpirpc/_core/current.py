"""Which runtime a thread works for: the only state of the module kind in mpirpc.

A process normally has one runtime. Executor threads belong to theirs, whatever the process's is, so that
several can live in one process (tests do that). Typed loosely, as the class ``Runtime`` lies layers above.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from mpirpc.errors import NotInitializedError


class _OfThread(threading.local):
    """What a thread that has set nothing sees; a missing attribute would cost ten times as much."""

    runtime: Any = None


_thread = _OfThread()
_process: Any = None
_why_none = "call mpirpc.init_rpc on every rank first"
_forked = False
_runtimes: weakref.WeakSet[Any] = weakref.WeakSet()


def get_current() -> Any:
    """Return the runtime of this thread.

    Raises:
        NotInitializedError: There is none.
    """
    runtime = _thread.runtime or _process
    if runtime is None:
        raise NotInitializedError(
            "RPC has not been initialized: mpirpc is not running in this process", _why_none
        )
    return runtime


def get_current_or_none() -> Any:
    """Return the runtime of this thread, or None."""
    return _thread.runtime or _process


def set_process_runtime(runtime: Any, why_none: str = "") -> None:
    """Make ``runtime`` (or none, with the hint for those who ask) that of the process."""
    global _process, _why_none
    _process = runtime
    if why_none:
        _why_none = why_none


def set_thread_runtime(runtime: Any) -> Any:
    """Make ``runtime`` (or none) that of the calling thread; return the one before."""
    before = _thread.runtime
    _thread.runtime = runtime
    return before


def add_runtime(runtime: Any) -> None:
    """Remember a runtime, so that its RRefs and futures refuse to work in a forked child."""
    _runtimes.add(runtime)


def is_forked() -> bool:
    """Say whether this process was forked by another that has mpirpc, and so MPI, loaded."""
    return _forked


def _after_fork_in_child() -> None:
    """A forked child has its parent's memory and none of its threads, and MPI is not its to use."""
    global _forked
    _forked = True
    why = "this process was forked from an RPC worker: MPI cannot be used in it"
    set_process_runtime(None, why)
    set_thread_runtime(None)
    for runtime in list(_runtimes):
        runtime.forsake(why)


os.register_at_fork(after_in_child=_after_fork_in_child)
