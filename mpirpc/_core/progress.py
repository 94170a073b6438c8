"""The progress engine: one lock around the network, and rules for who looks after it.

* Whoever holds the *lock* makes transport calls; it is held for one step at a time.
* Whoever holds the *lead* polls again and again. A thread that waits for something takes the lead if nobody
  has it, else it parks until its thing is done or the lead is handed to it. When nobody waits, an executor
  thread leads.
* What arrives is handled with neither lock nor lead held, so handlers and the code they run may block or
  send.
* A thread that sends does so itself if the lock is free; if not, it puts the message into the outbox, which
  the holder empties before it lets go. So nobody ever blocks on the lock.

Finalizers append to ``chores`` (atomic, takes no lock) and wake the leader, which carries them out.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from mpirpc._core import interrupts
from mpirpc._core.timing import UNLIMITED, Backoff, GilWait, monotonic
from mpirpc._core.transport import Arrival, Outgoing, Transport
from mpirpc._core.waiter import Waiter
from mpirpc.errors import NotInitializedError, TransportError

log = logging.getLogger("mpirpc.progress")

FOLLOW = 0.05
"""How long a parked thread sleeps at most before it looks again whether the lead is free, in seconds."""

LOOKS_BESIDE = 100
"""How often a thread polls beside an executor thread that leads, before it parks."""

LONG_SLEEP = 0.1
"""Longest sleep, in seconds, of an idle leader that messages wake."""

UNFINISHED_SLEEP = 1e-4
"""Longest sleep, in seconds, while a transfer is under way: MPI moves it only when it is called."""


class ProgressEngine:
    """Moves one worker's communication forward.

    Args:
        transport: The network.
        handle: Called with each message that arrived; must not block, may send.
        spin_time: Seconds that a leader polls without sleeping after the last event.
        idle_sleep: Longest sleep, in seconds, of an idle leader that messages do not wake.
    """

    def __init__(
        self, transport: Transport, handle: Callable[[Arrival], None], spin_time: float, idle_sleep: float
    ) -> None:
        self.transport = transport
        # user code to run; handlers add, executor threads take. What must not wait for calls to end is urgent
        self.works: deque[Callable[[], None]] = deque()
        self.urgent: deque[Callable[[], None]] = deque()
        # what finalizers left to do, with its argument; the leader carries it out
        self.chores: deque[tuple[Callable[[Any], None], Any]] = deque()
        self.num_leads = 0  # how often a thread has taken the lead; a lasting lead leaves it as it is
        self.on_vacant: Callable[[], None] = lambda: None  # nobody waits and the lead is free
        self.on_works: Callable[[], None] = lambda: None  # a waiting thread received works it may not run
        self.on_alarm: Callable[[float], float] = lambda now: UNLIMITED  # returns the next alarm
        self.alarm_at = UNLIMITED
        self.gil_wait: GilWait | None = None  # if set, waits for the interpreter are measured
        self.failure: TransportError | None = None  # set once, by the thread that met it
        self.on_failure: Callable[[TransportError], None] = lambda error: None
        self._handle = handle
        self._spin_time, self._idle_sleep = spin_time, idle_sleep
        self._lock = threading.Lock()  # around every transport call
        self._lead = threading.Lock()
        self._leader: Waiter | None = None  # what the leader waits for; unparking it ends its sleep
        self._executor_leads = False  # whether the leader is an executor thread
        self._followers: deque[Waiter] = deque()  # parked threads that would take the lead
        self._outbox: deque[tuple[int, Outgoing]] = deque()
        # messages that were received and not handled yet; _handle_all() adds, any polling thread takes: the
        # handler of one may wait for the next
        self._arrived: deque[Arrival] = deque()
        # the idents of threads that have messages to handle: adding to a list and taking off are atomic.
        # _poll() adds under the lock, _handle_all() takes off
        self._in_hand: list[int] = []
        self._sum: tuple[list[int], Waiter] | None = None
        self._sum_posted = False
        self._is_closed = False
        self._why_closed = "the RPC group was shut down while this thread waited"
        self.sums: list[int] = []  # result of the latest sum

    # --- sending ---

    def submit(self, dest: int, message: Outgoing) -> None:
        """Send ``message``; return at once.

        Thread: any.   Progress: never blocks.
        Errors: if the transport refuses the message, ``message.on_failed`` is called.
        """
        lock = self._lock
        if not self._outbox and lock.acquire(False):
            refused: Exception | None = None
            try:
                self.transport.post_send(dest, message)
            except Exception as error:
                refused = error
            finally:
                lock.release()
            if refused is not None:
                self._on_refused(message, refused)
        else:
            self._outbox.append((dest, message))
        if self._outbox:
            self._empty_outbox()
            if self._is_closed:
                self._refuse_outbox()
        leader = self._leader  # no time to sleep: polling moves what is long, and who answers at once rings
        if leader is not None:  # no bell; a request brings a deadline, too
            leader.unpark()

    def wake(self) -> None:
        """End the sleep of the leader, if it sleeps."""
        leader = self._leader
        if leader is not None:
            leader.unpark()

    def _empty_outbox(self) -> None:
        """Send what is in the outbox, unless another thread is about to do so."""
        while self._outbox and self._lock.acquire(False):
            try:
                self._flush()
            finally:
                self._lock.release()

    def _flush(self) -> None:
        """Send what is in the outbox. The lock is held."""
        while self._outbox:
            try:
                dest, message = self._outbox.popleft()
            except IndexError:
                return
            try:
                self.transport.post_send(dest, message)
            except Exception as error:
                self._on_refused(message, error)

    def _on_refused(self, message: Outgoing, error: Exception) -> None:
        """The transport did not take a message."""
        if message.on_failed is not None:
            self.urgent.append(partial(message.on_failed, error))
        self.on_works()

    # --- polling ---

    def _poll(self) -> Sequence[Arrival]:
        """Take one look at the network, if nobody else is at it."""
        # after a failure heads and frames may be out of step: look no more
        if self.failure is not None or not self._lock.acquire(False):
            return ()
        try:
            if self._outbox:
                self._flush()
            if self._sum is not None:
                self._move_sum()
            arrivals = self.transport.poll()
            if arrivals:
                self._in_hand.append(get_ident())
            return arrivals
        except Exception as error:
            if not isinstance(error, TransportError):
                error = TransportError(f"receiving failed: {type(error).__name__}: {error}")
            self._fail(error)
            return ()
        finally:
            self._lock.release()
            if self._outbox:
                self._empty_outbox()

    def _fail(self, error: TransportError) -> None:
        if self.failure is None:
            self.failure = error
            self.urgent.append(lambda: self.on_failure(error))
            self.on_works()

    def try_lead(self) -> bool:
        """Take the lead if it is free."""
        return self._lead.acquire(False)

    def is_led(self) -> bool:
        """Say whether some thread has the lead."""
        return self._lead.locked()

    def lead(self, goal: Waiter, deadline: float, takes_works: bool = False) -> None:
        """Poll until ``goal.done`` or the deadline. The caller has the lead on entry, and not on return.

        May return earlier, when another thread has taken the lead.
        """
        self.num_leads += 1
        self._executor_leads = takes_works
        self._leader = goal
        backoff: Backoff | None = None  # made when there is nothing to do
        yields_until = 0.0  # before, it does not sleep
        holds = True
        try:
            while not goal.done and not self._is_closed:
                if interrupts.is_noted and interrupts.is_noted_here():
                    return
                now = monotonic()
                if now >= self.alarm_at:
                    self.alarm_at = now + 1.0
                    self.chores.append((self._ring, now))  # it may run callbacks: not under the lead
                arrivals = self._poll()
                if arrivals or self._arrived or self.chores:
                    self._leader = None
                    self._lead.release()
                    holds = False
                    self._handle_all(arrivals, takes_works)
                    if goal.done or not self._lead.acquire(False):
                        return
                    holds = True
                    self._leader = goal
                    backoff, yields_until = None, 0.0
                    continue
                if now >= deadline or (takes_works and self._followers):
                    return
                if backoff is None:
                    backoff = Backoff(self._spin_time, now)
                    if self.gil_wait is not None:
                        backoff.give_way = self.gil_wait.give_way
                    yields_until = now + self._spin_time
                if now < yields_until:
                    backoff.give_way()
                else:
                    self._pause(goal, backoff, now, deadline)
        finally:
            if holds:
                self._leader = None  # what it waited for may hold the user's tensors
                self._lead.release()
            self._promote()

    def _pause(self, goal: Waiter, backoff: Backoff, now: float, deadline: float) -> None:
        """Pass some time, until ``goal`` is unparked or a message may have come."""
        bell = self.transport.bell
        if self.transport.has_unfinished():
            backoff.pause(now, goal.park, UNFINISHED_SLEEP)
        elif bell is None:
            backoff.pause(now, goal.park, self._idle_sleep)
        else:
            longest = min(LONG_SLEEP, deadline - now, self.alarm_at - now)
            backoff.pause(now, partial(goal.rest, bell), max(0.0, longest))

    def _handle_all(self, arrivals: Sequence[Arrival], takes_works: bool) -> None:
        """Handle what ``_poll`` has returned, what others have not come to, and the chores."""
        arrived = self._arrived
        if arrivals:
            arrived.extend(arrivals)
        else:
            self._in_hand.append(get_ident())  # first: whoever asks looks at both
        try:
            while arrived:
                try:
                    arrival = arrived.popleft()
                except IndexError:
                    break
                try:
                    self._handle(arrival)
                except Exception:
                    log.exception("a message could not be handled; this is a bug in mpirpc")
        finally:
            self._in_hand.remove(get_ident())
        while self.chores:
            try:
                chore, argument = self.chores.popleft()
            except IndexError:
                break
            try:
                chore(argument)
            except Exception:
                log.exception("a dead handle could not be released; this is a bug in mpirpc")
        if (self.works or self.urgent) and not takes_works:
            self.on_works()

    def is_handling(self) -> bool:
        """Say whether this thread is handling messages: when that is over it sees to the works it leaves."""
        return get_ident() in self._in_hand

    def _ring(self, now: float) -> None:
        """End what is overdue, and set the next alarm.

        A thread may set an earlier alarm at the same time and lose; looking again every second makes up for
        it.
        """
        self.alarm_at = min(self.alarm_at, self.on_alarm(now))

    def _promote(self) -> None:
        """Wake one parked thread to take the lead; if there is none, tell the executor."""
        if self._lead.locked():
            return
        while self._followers:
            try:
                self._followers.popleft().unpark()
            except IndexError:  # the last one has just gone
                break
            return
        self.on_vacant()

    # --- waiting ---

    def wait(self, goal: Waiter, deadline: float = UNLIMITED) -> bool:
        """Wait until ``goal.done``, moving communication forward meanwhile; say whether it is.

        Thread: any, without a lock held.   Progress: blocks until the deadline at most.
        """
        if self._in_hand and self.is_handling() and (self.works or self.urgent):
            self.on_works()  # it waits amid its messages, for what may be among them
        is_offered = False  # the lead, by a thread that gave it up: who does not take it passes it on
        try:
            while not goal.done:
                if self._is_closed:
                    raise NotInitializedError(self._why_closed)
                if interrupts.is_noted:
                    interrupts.raise_noted()
                if self._lead.acquire(False):
                    is_offered = False
                    self.lead(goal, deadline)
                else:
                    is_offered = self._follow(goal, deadline)
                if not goal.done and monotonic() >= deadline:
                    break
        finally:
            if is_offered:
                self._promote()
        return goal.done

    def _follow(self, goal: Waiter, deadline: float) -> bool:
        """Park until ``goal`` is done or the lead is offered; say whether it was."""
        self._followers.append(goal)
        self.wake()  # an executor thread hands the lead over
        if not (self._executor_leads and self._look_around(goal)):
            goal.park(min(FOLLOW, deadline - monotonic()))
        try:
            self._followers.remove(goal)
        except ValueError:
            return True
        return False

    def _look_around(self, goal: Waiter) -> bool:
        """While an executor thread is on its way to give the lead up, poll beside it.

        Returns:
            Whether ``goal`` is done, or the lead is free.
        """
        for _ in range(LOOKS_BESIDE):
            arrivals = self._poll()
            if arrivals or self._arrived:
                self._handle_all(arrivals, False)
            if goal.done or not self._lead.locked():
                return True
            os.sched_yield()
        return False

    # --- agreeing with all workers ---

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep all threads off the transport: what it has counted as received is handled, or ``has_in_hand``.

        Thread: any. Blocks for one step of another thread.
        """
        lock = self._lock
        if isinstance(lock, _NeverFree):
            yield
            return
        with lock:
            yield
        self._empty_outbox()

    @property
    def has_in_hand(self) -> bool:
        """Say whether a message that was received is not handled yet."""
        return bool(self._arrived or self._in_hand)

    def post_sum(self, values: list[int]) -> Waiter:
        """Add up ``values`` over all workers; when the waiter is done, ``sums`` holds the result."""
        waiter = Waiter()
        self._sum_posted = False
        self._sum = (values, waiter)
        return waiter

    def _move_sum(self) -> None:
        """Post the sum, or look after it. The lock is held."""
        if self._sum is None:
            return
        values, waiter = self._sum
        if not self._sum_posted:
            self.transport.post_sum(values)
            self._sum_posted = True
        sums = self.transport.poll_sum()
        if sums is not None:
            self._sum = None
            self.sums = sums
            waiter.set()

    def close(self, graceful: bool) -> None:
        """Send what is left and close the transport. No thread polls any more; later sends are refused.

        Thread: any.
        """
        lock = self._lock
        if isinstance(lock, _NeverFree):
            return
        with lock:
            if self._is_closed:
                return
            self._flush()  # a Leave, if the thread that had the lock has not come to it yet
            self.transport.close(graceful)
            self._is_closed = True
            # the lock stays taken: nobody gets at the closed transport
            self._lock = _NeverFree()  # type: ignore[assignment]
        self._refuse_outbox()

    def forsake(self, why: str) -> None:
        """In a forked child: never touch the network again, nor its locks: who held them is not here."""
        self._is_closed, self._why_closed = True, why
        self._lock = _NeverFree()  # type: ignore[assignment]

    def _refuse_outbox(self) -> None:
        while self._outbox:
            try:
                _, message = self._outbox.popleft()
            except IndexError:
                return
            if message.on_failed is not None:
                message.on_failed(NotInitializedError("the RPC group was shut down before this message left"))


class _NeverFree:
    """Takes the place of the lock of a closed engine."""

    def acquire(self, blocking: bool = True) -> bool:
        return False

    def release(self) -> None:
        return
