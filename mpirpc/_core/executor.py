"""The threads of a worker: they lead the progress engine while nobody waits, and run calls.

All executor threads are alike. At any time at most one of them leads, one (the *deputy*) is at hand to take
over, and the others run works or are spare. A thread that receives a call gives the lead up and runs the call
itself: no switch of threads. If that takes longer than :data:`PATIENCE`, the deputy takes the lead and the
next call. A deputy that finds the same leader at rest for a while parks until it is needed ("cold"), so that
an idle worker has one thread that wakes up more often than once a second.

*Urgent* works (finishing futures, answering fetches, steps of a backward pass) are not calls: they run
whatever else runs, so that no call can keep away what another one waits for.

A thread that waits inside a call (for another call, say) does not count against ``num_threads``: nested calls
of any depth cannot use the pool up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from mpirpc._core.progress import ProgressEngine
from mpirpc._core.timing import UNLIMITED, monotonic
from mpirpc._core.waiter import Waiter

log = logging.getLogger("mpirpc.executor")

PATIENCE = 1e-3
"""Seconds between two looks of the deputy when the last one found everything as it was."""

MOST_PATIENCE = 8e-3
"""Seconds between two looks, at most, as long as works come and go: each look takes the interpreter away from
the threads that work."""

VACANT_AFTER = 2
"""Looks without any change after which a free lead is taken: fewer would take it from a thread that makes
slow calls one after the other, and make them slower still."""

COLD_AFTER = 40
"""Looks without any change after which the deputy parks."""

COLD_PATIENCE = 1.0
"""Seconds between two looks of a deputy that is parked. Whoever gives the lead up to run a work calls it; who
handles a message does not, and is held up if user code blocks that rebuilds an object of the message."""

SPARE_LIFE = 10.0
"""Seconds after which a spare thread ends."""

LAST_WORKS = 0.5
"""Seconds that works still running at the end, all together, may take before they are left alone."""

Work = Callable[[], None]


class _Retired(Exception):
    """A spare thread was not needed for long and ends."""


class _ThreadGoal(Waiter):
    """What an executor thread that leads waits for: a work it may run, or the end.

    ``is_called``: As a spare thread it was woken for a work; there may be more.
    """

    __slots__ = ("_executor", "is_called")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.is_called = False
        super().__init__()

    @property
    def done(self) -> bool:  # asked at every look at the network: no further call
        executor = self._executor
        engine = executor.engine
        if engine.works and executor.num_running < executor.num_threads:
            return True
        return bool(engine.urgent) or executor.is_stopping

    @done.setter
    def done(self, value: bool) -> None:
        return


class Executor:
    """A pool of threads that serves one progress engine.

    Args:
        engine: Its ``works`` and ``urgent`` are run here; its ``on_vacant`` and ``on_works`` are set here.
        num_threads: How many works may run at one time, not counting those that wait and urgent ones.
        name: For the threads' names.
        prepare: Called first on every new thread.
    """

    def __init__(self, engine: ProgressEngine, num_threads: int, name: str, prepare: Work) -> None:
        self.engine = engine
        self.num_threads = num_threads
        self._name = name
        self._prepare = prepare
        self._any_thread = _ThreadGoal(self)
        self._lock = threading.Lock()  # around changes of what follows
        self.threads: dict[int, threading.Thread] = {}  # by ident: all that live
        self._spare: list[_ThreadGoal] = []  # parked without a task
        self._deputy: _ThreadGoal | None = None
        self.num_running = 0  # works being run, without urgent ones and those that wait
        self._counts: dict[int, int] = {}  # by thread that runs a work: 1 if the work counts, 0 if urgent
        self._num_busy = 0  # works of any kind being run
        self._num_made = 0
        self._deputy_is_cold = False
        self._num_started = 0  # works begun so far
        self.is_stopping = False
        engine.on_vacant = self._on_vacant
        engine.on_works = self._wake_one

    @property
    def is_busy(self) -> bool:
        """Say whether a work of any kind is being run, or waits inside."""
        return self._num_busy > 0

    @property
    def num_threads_alive(self) -> int:
        """Threads of the pool now."""
        return len(self.threads)

    def start(self) -> None:
        """Start the first thread."""
        self._add_thread(may_lead=True)

    def submit(self, work: Work) -> None:
        """Run ``work`` on an executor thread, soon. Thread: any."""
        self._add(self.engine.works, work)

    def submit_urgent(self, work: Work) -> None:
        """Run ``work`` on an executor thread, soon, however many works run. Thread: any."""
        self._add(self.engine.urgent, work)

    def _add(self, queue: deque[Work], work: Work) -> None:
        queue.append(work)
        if self._deputy is None or not self.engine.is_handling():  # without a deputy nobody looks meanwhile
            self._wake_one()

    def has_task(self) -> bool:
        """Say whether a leading executor thread must stop: there is a work it may run, or the end came."""
        return self._any_thread.done

    def owns_this_thread(self) -> bool:
        """Say whether the calling thread is an executor thread."""
        return threading.get_ident() in self.threads

    def stop(self) -> None:
        """End all threads. Urgent works are begun before, others that have not begun are dropped.

        Thread: any but an executor thread. Works that do not end keep their (daemon) threads, and this call
        :data:`LAST_WORKS` seconds.
        """
        deadline = monotonic() + LAST_WORKS
        while self.engine.urgent and monotonic() < deadline:
            self._wake_one()
            time.sleep(1e-4)
        self.is_stopping = True
        with self._lock:
            threads = list(self.threads.values())
            goals = [*self._spare, *([self._deputy] if self._deputy else [])]
        for goal in goals:
            goal.unpark()
        self.engine.wake()
        deadline = monotonic() + LAST_WORKS
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - monotonic()))
            if thread.is_alive():
                log.warning("a call is still running at shutdown: thread=%s", thread.name)
        # no handler of a dead pool stays behind in the engine
        self.engine.on_vacant = self.engine.on_works = lambda: None

    # --- waiting inside a work ---

    def begin_wait(self) -> None:
        """Note that this executor thread waits: another work may run in its place."""
        with self._lock:
            self.num_running -= self._counts.get(threading.get_ident(), 0)
        self._wake_one()

    def end_wait(self) -> None:
        """Note that this executor thread runs on."""
        with self._lock:
            self.num_running += self._counts.get(threading.get_ident(), 0)

    # --- threads ---

    def _add_thread(self, may_lead: bool) -> None:
        with self._lock:
            if self.is_stopping:
                return
            self._num_made += 1
            name = f"{self._name}-{self._num_made}"
            thread = threading.Thread(target=self._run, args=(may_lead,), name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # none can be started any more: the interpreter ends
                thread.start()
                self.threads[thread.ident or 0] = thread

    def _run(self, may_lead: bool) -> None:
        """Be an executor thread. ``may_lead``: take the lead at once if it is free, do not stand by first."""
        self._prepare()
        goal = _ThreadGoal(self)
        try:
            while not self.is_stopping:
                work = self._take_work()
                if work is not None:
                    if goal.is_called or self._deputy_is_cold:  # nobody else looks whether there are more
                        self._wake_one()
                    self._run_work(work)
                    del work  # an idle thread keeps nothing of the user's alive
                    may_lead = True
                elif may_lead and self.engine.try_lead():
                    goal.is_called = False
                    self.engine.lead(goal, UNLIMITED, takes_works=True)
                    may_lead = goal.done  # if not, the lead belongs to a thread that waits: leave it to it
                else:
                    may_lead = self._stand_by(goal)
        except _Retired:
            return
        finally:
            with self._lock:
                self.threads.pop(threading.get_ident(), None)

    def _take_work(self) -> Work | None:
        """Return a work that may run now, if there is one."""
        engine = self.engine
        with self._lock:
            if engine.urgent:
                work, counts = engine.urgent.popleft(), 0
            elif engine.works and self.num_running < self.num_threads:
                work, counts = engine.works.popleft(), 1
            else:
                return None
            self._num_busy += 1
            self.num_running += counts
            self._counts[threading.get_ident()] = counts
            self._num_started += 1
            return work

    def _run_work(self, work: Work) -> None:
        if self._deputy is None or (self._deputy_is_cold and not self.engine.is_led()):
            self._call_deputy()  # while the lead is taken, _on_vacant() will
        try:
            work()
        except BaseException:
            log.exception("a work of the library failed; this is a bug in mpirpc")
        finally:
            with self._lock:
                self._num_busy -= 1
                self.num_running -= self._counts.pop(threading.get_ident())

    # --- standing by ---

    def _stand_by(self, goal: _ThreadGoal) -> bool:
        """Be the deputy until there is something to do, or a spare thread; say whether to take the lead.

        Raises:
            _Retired: This spare thread was not needed for long.
        """
        with self._lock:
            if self.is_stopping:  # too late to be woken by stop()
                return False
            goal.is_called = False
            is_deputy = self._deputy is None
            if is_deputy:
                self._deputy = goal
            else:
                self._spare.append(goal)
        if is_deputy:
            self._watch(goal)
            return True
        woken = goal.park(SPARE_LIFE)
        with self._lock:
            if goal in self._spare:  # not called: an old wake-up, left from leading, or none in all that time
                self._spare.remove(goal)
                if not woken:
                    raise _Retired
        return False

    def _watch(self, goal: _ThreadGoal) -> None:
        """Look now and then whether the lead is free or a work waits; then stop being the deputy.

        A lead that is free but was taken since the last look belongs to a thread that waits again and again:
            leave it alone.
        """
        engine, unchanged, seen, patience = self.engine, 0, (-1, -1), PATIENCE
        while not goal.done:
            now = (engine.num_leads, self._num_started)
            if now == seen:
                unchanged, patience = unchanged + 1, PATIENCE
            else:
                unchanged, patience = 0, min(2 * patience, MOST_PATIENCE)
            seen = now
            if unchanged >= VACANT_AFTER and not engine.is_led():
                break
            if unchanged < COLD_AFTER or not engine.is_led():
                goal.park(patience)
                continue
            self._deputy_is_cold = True
            if engine.is_led() and not goal.done:  # who gives the lead up from now on sees that we are cold
                goal.park(COLD_PATIENCE)
            self._deputy_is_cold = False
        with self._lock:
            self._deputy = None

    def _call_deputy(self) -> None:
        """See to it that a deputy is awake while this thread runs a work."""
        with self._lock:
            waiting = self._deputy or (self._spare.pop() if self._spare else None)
        if waiting is not None:
            waiting.unpark()
        else:
            self._add_thread(may_lead=False)

    def _on_vacant(self) -> None:
        """Nobody has the lead: wake the deputy, if it does not look by itself."""
        if self._deputy_is_cold:
            deputy = self._deputy
            if deputy is not None:
                deputy.unpark()

    def _wake_one(self) -> None:
        """If a work waits, which this thread will not run, wake one that will: a spare one, if there is any.

        The deputy stays where it is: to wake another for its place would cost as much once more.
        """
        if self.has_task():
            self.engine.wake()
            with self._lock:
                spare = self._spare.pop() if self._spare else None
                if spare is not None:
                    spare.is_called = True
            if spare is not None:
                spare.unpark()
            else:
                self._call_deputy()
