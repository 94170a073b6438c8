"""Ctrl-C while the main thread is inside the machinery: held back until it can be raised without harm.

Python raises ``KeyboardInterrupt`` between any two steps of the main thread: also after a lock was taken and
before the code that gives it back, or with a message in hand. The group would hang from then on. So while a
group runs, SIGINT that finds the main thread there is only noted; a wait looks at the note and raises.
Elsewhere, user code that the machinery has called included, it strikes at once as ever.

A program that has a SIGINT handler of its own keeps it. Thread: what is not said otherwise, the main one.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import FrameType

INSIDE = frozenset(
    f"mpirpc._core.{name}"
    for name in ("agent call contents executor future gathering progress rref_store runtime serve".split())
)
"""Modules whose steps belong together. All their waits look at the note."""

LIBRARIES = sys.stdlib_module_names | {"mpi4py", "mpirpc", "numpy", "torch"}
"""What those modules call: packages whose frames do not make it user code."""

AGAIN = 5e-3
"""Seconds after which a noted SIGINT is tried again, should nobody wait."""

is_noted = False
"""Whether a SIGINT is held back. Any thread may read it."""

_groups: set[int] = set()  # ids of what asked for it


def hold_back(group: object) -> None:
    """From now on hold SIGINT back where it harms ``group``. Thread: any; only the main one succeeds."""
    _groups.add(id(group))
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_sigint)


def stop_holding_back(group: object) -> None:
    """Forget ``group``, which ended. Thread: any; only the main one puts Python's handler back."""
    _groups.discard(id(group))
    if not _groups and _is_main_thread() and signal.getsignal(signal.SIGINT) is _on_sigint:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_noted_here() -> bool:
    """Say whether this thread should end its wait. Thread: any."""
    return is_noted and _is_main_thread()


def raise_noted() -> None:
    """Raise the SIGINT that was held back, if there is one. Thread: any, with nothing half done."""
    global is_noted
    if is_noted_here():
        is_noted = False
        raise KeyboardInterrupt


def strike(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, now or when it does no harm: for any signal that ends the program.

    Until it is raised the handler of SIGINT is called again, and has to call this again.
    """
    _on_sigint(signum, frame)


def forget() -> None:
    """Drop the note: there is nothing left to interrupt."""
    global is_noted
    is_noted = False


def _on_sigint(signum: int, frame: FrameType | None) -> None:
    global is_noted
    if not _is_inside(frame):
        is_noted = False
        signal.default_int_handler(signum, frame)
    elif not is_noted:
        is_noted = True
        _thread.start_new_thread(
            _try_again, ()
        )  # the module threading has locks, and may be what was interrupted


def _try_again() -> None:
    """Until it is raised. Thread: one of its own."""
    while is_noted:
        time.sleep(AGAIN)
        if is_noted:
            # not interrupt_main(): it would wait for the end of a sleep or a read
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_inside(frame: FrameType | None) -> bool:
    """Say whether the machinery was interrupted, or a library at its behest; not so if user code was."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in INSIDE:
            return True
        if name.partition(".")[0] not in LIBRARIES:
            return False
        frame = frame.f_back
    return False


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
