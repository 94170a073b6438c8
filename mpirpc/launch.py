"""``run_main``: run a program and never hang at its end; ``on_terminate``: save state when told to end.

How a rank ends, by what happens in the program::

    main returns               wait until all ranks have come so far, then exit status 0
    an exception               its traceback is printed, once for the job; the job is aborted, status 1
    sys.exit(n), n not 0       wait EXIT_PATIENCE for the others, who may do the same; then abort, status n
    SIGTERM, SIGINT            unwind main, run the callbacks of ``on_terminate``, meet the others while there
                               is grace time, leave RPC, exit status 128 + the signal's number

The signal's handler raises an exception (a ``KeyboardInterrupt``) in the main thread, as Ctrl-C does, so
``finally`` blocks and context managers of the program run before the callbacks. A main thread that is stuck
in C (an MPI collective whose partner is gone) never comes to that: a watching thread ends the process when
the grace time is over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TypeVar

from mpirpc._core import interrupts
from mpirpc._core.current import get_current_or_none
from mpirpc._core.job import Job, get_job
from mpirpc._core.launcher import Launcher, find_wrong_start, library_name, read_launcher
from mpirpc._core.timing import deadline_after, monotonic
from mpirpc.api import shutdown
from mpirpc.errors import ConfigurationError

__all__ = [
    "Launcher",
    "find_wrong_start",
    "library_name",
    "on_terminate",
    "read_launcher",
    "run_main",
]

EXIT_PATIENCE = 10.0
"""Seconds that a rank with an exit status other than 0 waits for the others before it ends the job."""

MEET_PATIENCE = 5.0
"""Seconds that a rank which got a signal waits for the others, at least: one of them may save for long."""

LAST_SECONDS = 2.0
"""Of the grace time: the others have not come by then, and the rank ends the job."""

ABORT_PATIENCE = 10.0
"""Seconds that MPI may take to end a process after MPI_Abort."""

DEFAULT_GRACE = 25.0
"""Seconds from the signal to the end, at most: less than the 30 s that Slurm gives by default (KillWait)."""

TURN = 0.1
"""Seconds for which a rank that fails looks whether another was first; further hosts wait longer."""

MAX_TURNS = 10

_Callback = TypeVar("_Callback", bound=Callable[[], object])

_callbacks: list[Callable[[], object]] = []
_is_running = False


def on_terminate(callback: _Callback) -> _Callback:
    """Have ``callback()`` called when this rank is told to end by SIGTERM or SIGINT, for saving state.

    Works under ``python -m mpirpc run`` and :func:`run_main`, else it warns. Callbacks run in the order in
    which they were given, after the program has been unwound; an exception in one is printed and stops no
    other. RPC still runs; the other ranks may have been told to end too, so calls to them may fail. Nothing
    is called when the job ends because a rank failed, nor on a rank that is stuck outside of Python.

    Args:
        callback: Takes no arguments. It must be done before the grace time is over.

    Returns:
        ``callback``, so that it can be used as a decorator.

    Thread: callbacks run on the main thread, one at a time.
    """
    if not _is_running:
        warnings.warn(
            "mpirpc.on_terminate has an effect only under python -m mpirpc run, or inside mpirpc.run_main",
            RuntimeWarning,
            stacklevel=2,
        )
    _callbacks.append(callback)
    return callback


def run_main(
    main: Callable[[], object], *, signals: Sequence[str] = (), grace: float = DEFAULT_GRACE
) -> None:
    """Run ``main()`` on this rank so that its end, of whatever kind, ends the job and hangs no other rank.

    Every rank of the job must call it, on the main thread. Inside a program that ``python -m mpirpc run`` has
    started it only calls ``main``. What ``main`` returns is ignored.

    Args:
        main: The program.
        signals: Further signals to end by, such as ``"USR1"``, beside SIGTERM and SIGINT.
        grace: Longest time in seconds from a signal to the end of the process.

    Raises:
        SystemExit: ``main`` called ``sys.exit`` with a status other than 0, or a signal came: 128 and its
        number. ConfigurationError: A signal's name is unknown, or this is not the main thread.

    Progress: returns when ``main`` has ended on all ranks. Exceptions of ``main`` do not come out: they end
    the job.
    """
    global _is_running
    if _is_running:
        main()
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("run_main was called on another than the main thread")
    numbers = [_signal_number(name) for name in ("TERM", "INT", *signals)]
    job = get_job()
    _is_running = True
    watch = _Signals(job, numbers, grace)
    try:
        status = _run(main, job, watch)
    finally:
        watch.close()
        _is_running = False
        _callbacks.clear()
    if status:
        raise SystemExit(status)


def _signal_number(name: str) -> int:
    found: int | None = getattr(signal, f"SIG{name.upper().removeprefix('SIG')}", None)
    if found is None:
        raise ConfigurationError(f"there is no signal {name!r}", "write for example USR1")
    return found


def _run(main: Callable[[], object], job: Job, watch: _Signals) -> int:
    """Run the program and what follows; return the exit status, on which all agree not to hang."""
    try:
        watch.may_raise = True
        main()
        watch.may_raise = False
        status = 0
    except SystemExit as error:
        status = _status_of(error)
    except KeyboardInterrupt as error:
        watch.number = watch.number or signal.SIGINT  # somebody else's handler may have raised it
        error.__traceback__ = None  # its frames hold the program's tensors
    except BaseException as error:
        if not watch.number:  # else: a consequence of the others' end
            _fail(job, error)
    watch.may_raise = False
    interrupts.forget()
    if not watch.number and _meet(job, watch, status):
        return status
    return _terminate(job, watch)


def _status_of(error: SystemExit) -> int:
    """Return the exit status that Python would give, and print what it would print."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _meet(job: Job, watch: _Signals, status: int) -> bool:
    """Wait for the other ranks' ends; say whether there was no signal meanwhile."""
    deadline = deadline_after(EXIT_PATIENCE if status else 0)
    if not job.is_threaded:
        shutdown(graceful=False)  # else RPC, if the program has left it running, serves until all are here
    job.post_agreement(status)
    while not watch.number:
        if job.wait_agreement(min(deadline, monotonic() + TURN)) is not None:
            if status:
                shutdown(graceful=False)
            return True
        if monotonic() >= deadline:
            _say(f"rank {job.rank} ends with exit status {status} and the others do not: ending the job")
            _abort(job, status)
    return False


# --- a failure ---


def _fail(job: Job, error: BaseException) -> None:
    """Print the traceback, unless another rank has failed before, and end the job."""
    job.board.post_failure()
    text = _describe_rank(job) + "".join(traceback.format_exception(error.with_traceback(_user_part(error))))
    _flush()
    time.sleep(TURN * (1 + min(job.host_index, MAX_TURNS)))
    if job.board.is_first():
        _write(text)
    else:
        time.sleep(ABORT_PATIENCE)  # the first one ends the job
    _abort(job, 1)


def _describe_rank(job: Job) -> str:
    runtime = get_current_or_none()
    worker = f", worker {runtime.agent.me.name!r}" if runtime is not None else ""
    return f"mpirpc: rank {job.rank} of {job.size}{worker}, host {job.host}, failed; the job is ended\n"


def _user_part(error: BaseException) -> TracebackType | None:
    """Cut the frames of whoever started the program off the beginning of a traceback."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace or error.__traceback__


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name in (__name__, "mpirpc.cli.run", "runpy") or frame.f_code.co_filename.startswith("<frozen ")


def _abort(job: Job, status: int) -> None:
    _flush()
    _end_after(ABORT_PATIENCE, status)
    job.abort(status)
    os._exit(status)  # MPICH: MPI_Abort may return before the launcher has ended this process


def _end_after(seconds: float, status: int) -> None:
    """End this process without ceremony if it is still there after that time."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _say(text: str) -> None:
    _write(f"mpirpc: {text}\n")


def _write(text: str) -> None:
    """Write to standard error in as few pieces as the system takes: other ranks' lines stay out of it."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it
            pass


# --- a signal ---


def _terminate(job: Job, watch: _Signals) -> int:
    """Run the callbacks, meet the others, leave; return the exit status."""
    status = 128 + watch.number
    for callback in list(_callbacks):
        try:
            callback()
        except Exception as error:
            _write(
                _describe_rank(job).replace("failed; the job is ended", "failed in an on_terminate callback")
            )
            _write("".join(traceback.format_exception(error)))
    if not job.is_threaded:
        shutdown(graceful=False)
    job.post_agreement(status)
    if job.wait_agreement(max(deadline_after(MEET_PATIENCE), watch.deadline - LAST_SECONDS)) is None:
        _abort(job, status)
    shutdown(graceful=False)
    return status


class _Signals:
    """Hears signals while the program runs.

    Args:
        job: All ranks.
        numbers: The signals.
        grace: Seconds from a signal to the end of the process.

    Attributes:
        number: The first signal that came; 0 if none did. Set by the handler.
        deadline: When the process ends, on the monotonic clock; 0 if no signal came. Set by the handler.
        may_raise: Whether the handler may unwind the main thread.
    """

    def __init__(self, job: Job, numbers: Sequence[int], grace: float) -> None:
        self._job = job
        self._grace = grace
        self.number = 0
        self.deadline = 0.0
        self.may_raise = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="mpirpc-signals", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._put_back)  # a child's signals are not ours
        self._is_open = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note; unwind the program. Thread: main."""
        if self.number:
            if self.may_raise and interrupts.is_noted:
                interrupts.strike(number, frame)
            return
        board = self._job.board
        if board.has_failure():  # the launcher ends us because another rank has failed
            if not board.is_first():
                os._exit(1)
            return
        self.number = number
        self.deadline = deadline_after(self._grace)
        if self.may_raise:
            interrupts.strike(number, frame)

    def _watch(self) -> None:
        """End the process when the grace time after a signal is over. Thread: its own.

        The system writes a signal's number to the pipe whatever the main thread does.
        """
        while data := os.read(self._read_end, 1):
            if signal.getsignal(data[0]) == self._on_signal:  # else the program handles it by itself
                break
        else:
            return
        status = 128 + data[0]
        if self._job.board.has_failure():
            _end_after(ABORT_PATIENCE, 1)
            return
        _end_after(self._grace, status)
        time.sleep(max(0.0, self._grace - 1))
        if not self.number:
            _say(
                f"rank {self._job.rank} got signal {data[0]} and does not come back to Python: "
                "no callbacks run"
            )

    def close(self) -> None:
        """Put everything back as it was."""
        self._put_back()
        os.close(self._write_end)
        self._thread.join(TURN)

    def _put_back(self) -> None:
        if self._is_open:
            self._is_open = False
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
