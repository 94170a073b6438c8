"""Unit tests for mpirpc._core.executor: works run, the network is looked after, whoever is busy."""

import threading
import weakref
from contextlib import contextmanager
from threading import get_ident

import pytest

from mpirpc._core import executor as module
from mpirpc._core.executor import Executor
from mpirpc._core.progress import ProgressEngine
from mpirpc._core.timing import monotonic
from mpirpc._core.transport import Outgoing
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc._core.waiter import Waiter
from tests.unit.waiting import until

LIMIT = 30.0
"""Seconds after which a test gives up waiting for a thread."""


class Pool:
    """An executor on a network of one; each message that arrives sets the event of that name."""

    def __init__(self, num_threads):
        self.events = {}
        self.prepared = []
        self.engine = ProgressEngine(LoopbackTransport(LoopbackNetwork(1), 0), self._handle, 1e-3, 1e-3)
        self.executor = Executor(self.engine, num_threads, "pool", lambda: self.prepared.append(get_ident()))
        self.executor.start()

    def _handle(self, arrival):
        self.event(bytes(arrival.head).decode()).set()

    def event(self, name):
        return self.events.setdefault(name, threading.Event())

    def arrives(self, name):
        """Send a message to oneself; say whether somebody handles it."""
        self.event(name)
        self.engine.submit(0, Outgoing(name.encode(), []))
        return self.event(name).wait(LIMIT)

    def run(self, work):
        """Run a work to its end and return what it returned."""
        results, over = [], threading.Event()

        def noted():
            results.append(work())
            over.set()

        self.executor.submit(noted)
        assert over.wait(LIMIT)
        return results[0]

    def run_together(self, count):
        """Run so many works at the same time, each until all have begun."""
        together = threading.Barrier(count + 1)
        for _ in range(count):
            self.executor.submit(lambda: together.wait(LIMIT))
        together.wait(LIMIT)


@contextmanager
def started(num_threads):
    """Give a pool, and see all its threads end."""
    made = Pool(num_threads)
    yield made
    made.executor.stop()
    assert made.executor.num_threads_alive == 0


@pytest.fixture(params=[1, 4])
def pool(request):
    with started(request.param) as made:
        yield made


@pytest.fixture
def small_pool():
    with started(1) as made:
        yield made


def test_idle_pool_looks_after_the_network(pool):
    assert all(pool.arrives(str(number)) for number in range(10))


def test_works_run_on_threads_of_the_pool(pool):
    assert not pool.executor.owns_this_thread()
    assert pool.run(pool.executor.owns_this_thread)
    assert pool.run(lambda: threading.current_thread().name).startswith("pool-")


def test_every_thread_is_prepared_first(pool):
    for _ in range(10):
        assert pool.run(get_ident) in pool.prepared
    assert len(set(pool.prepared)) == len(pool.prepared)


def test_works_put_in_by_a_handler_run(pool):
    over = threading.Event()
    pool.engine._handle = lambda arrival: pool.engine.works.append(over.set)
    pool.engine.submit(0, Outgoing(b"a", []))
    assert over.wait(LIMIT)


def test_network_is_looked_after_while_all_threads_are_busy(small_pool):
    """The work waits for a message without telling the pool: another thread must receive it."""
    assert small_pool.run(lambda: small_pool.arrives("a"))
    assert small_pool.run(lambda: all(small_pool.arrives(str(number)) for number in range(5)))


def test_no_more_works_run_at_once_than_allowed(small_pool):
    started, gate, over = [], threading.Event(), threading.Event()
    small_pool.executor.submit(lambda: started.append(1) or gate.wait(LIMIT))
    small_pool.executor.submit(lambda: started.append(2) or over.set())
    assert small_pool.arrives("a")  # somebody leads, and leaves the second work alone
    assert small_pool.arrives("b")
    assert 2 not in started
    gate.set()
    assert over.wait(LIMIT)
    assert started == [1, 2]


def test_as_many_works_run_at_once_as_allowed():
    pool = Pool(4)
    pool.run_together(4)
    pool.executor.stop()


def test_urgent_works_run_however_busy_the_pool_is(small_pool):
    over = threading.Event()

    def work():
        small_pool.executor.submit_urgent(over.set)
        return over.wait(LIMIT)

    assert small_pool.run(work)


def test_a_work_that_waits_lets_another_run(small_pool):
    """Handlers that wait do not count: eight deep with one thread."""
    executor = small_pool.executor

    def descend(depth):
        if depth == 0:
            return 0
        below, over = [], threading.Event()
        executor.submit(lambda: below.append(descend(depth - 1)) or over.set())
        executor.begin_wait()
        try:
            assert over.wait(LIMIT)
        finally:
            executor.end_wait()
        return below[0] + 1

    assert small_pool.run(lambda: descend(8)) == 8
    assert small_pool.run(lambda: executor.num_running) == 1


def test_failing_work_is_logged_and_the_pool_goes_on(pool, caplog):
    pool.executor.submit(lambda: 1 / 0)
    assert pool.run(lambda: 5) == 5
    while pool.executor.num_running:  # the failing work may be a moment behind
        pool.run(lambda: None)
    assert "ZeroDivisionError" in caplog.text


def test_finished_work_is_let_go(pool):
    class Thing:
        pass

    def make():
        thing = Thing()
        pool.run(lambda: thing)
        return weakref.ref(thing)

    ref = make()
    until(lambda: ref() is None)  # the thread that ran it may be a moment behind


def test_stop_ends_all_threads_and_drops_what_has_not_begun():
    pool = Pool(4)
    threads = [pool.run(threading.current_thread) for _ in range(10)]
    pool.executor.stop()
    assert not any(thread.is_alive() for thread in threads)
    ran = []
    pool.executor.submit(lambda: ran.append(1))
    assert (ran, pool.executor.num_threads_alive) == ([], 0)


def test_stop_tells_of_a_call_that_does_not_end(caplog, monkeypatch):
    pool, gate, started = Pool(1), threading.Event(), threading.Event()
    pool.executor.submit(lambda: started.set() or gate.wait(LIMIT))
    assert started.wait(LIMIT)
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: join(self, 0.01))
    pool.executor.stop()
    monkeypatch.undo()
    gate.set()
    assert "a call is still running at shutdown: thread=pool-" in caplog.text


def test_spare_threads_end_after_a_while(monkeypatch):
    monkeypatch.setattr(module, "SPARE_LIFE", 0.01)
    pool = Pool(8)
    pool.run_together(8)
    deadline = threading.Event()
    for _ in range(1000):
        if pool.executor.num_threads_alive <= 2:
            break
        deadline.wait(0.01)
    assert pool.executor.num_threads_alive <= 2
    assert pool.arrives("still there")
    pool.executor.stop()


def test_idle_deputy_parks_and_comes_back(monkeypatch, small_pool):
    """After many looks without a change it sleeps; the network must be looked after all the same."""
    monkeypatch.setattr(module, "COLD_AFTER", 1)
    monkeypatch.setattr(module, "PATIENCE", 1e-5)
    for number in range(50):
        assert small_pool.run(lambda number=number: small_pool.arrives(f"in {number}"))
        assert small_pool.arrives(f"out {number}")


def test_network_is_looked_after_while_a_message_is_being_handled(monkeypatch, small_pool):
    """As one whose contents take long to rebuild; also if all was at rest before."""
    monkeypatch.setattr(module, "PATIENCE", 1e-5)
    monkeypatch.setattr(module, "SPARE_LIFE", 1000.0)
    monkeypatch.setattr(module, "COLD_PATIENCE", 0.01)
    gate, handle = threading.Event(), small_pool.engine._handle
    blocked = threading.Event()

    def block_at_first(arrival):
        if bytes(arrival.head) == b"slow":
            blocked.set()
            gate.wait()
        handle(arrival)

    small_pool.engine._handle = block_at_first
    small_pool.run(lambda: None)
    until(lambda: small_pool.executor._deputy_is_cold)
    small_pool.engine.submit(0, Outgoing(b"slow", []))
    assert blocked.wait(LIMIT)
    try:
        assert small_pool.arrives("other")
    finally:
        gate.set()


# --- works that a thread hands over which waits and polls ---


@pytest.fixture
def waiting_pool(monkeypatch):
    """A pool with a spare thread and a deputy that does not look; the thread of the test waits and polls."""
    monkeypatch.setattr(module, "COLD_PATIENCE", 1000.0)
    with started(4) as made:
        made.run_together(2)
        until(lambda: made.executor._deputy_is_cold and made.executor._spare)
        monkeypatch.setattr(module, "PATIENCE", 1000.0)
        monkeypatch.setattr(module, "MOST_PATIENCE", 1000.0)
        yield made


def wait_beside(pool, handle):
    """Receive a message while this thread leads, handled by ``handle(goal)``, and wait for the goal."""
    goal, engine, executor = Waiter(), pool.engine, pool.executor
    engine._handle = lambda arrival: handle(goal)

    def is_settled():
        return not engine._executor_leads and len(executor._spare) == executor.num_threads_alive - 1

    def send():
        until(lambda: engine.is_led() and all(is_settled() for _ in range(1000)))
        engine.submit(0, Outgoing(b"a", []))

    sender = threading.Thread(target=send)
    sender.start()
    assert engine.wait(goal, monotonic() + LIMIT)
    sender.join()


def test_a_spare_thread_takes_what_is_handed_over_and_the_deputy_stays(waiting_pool, monkeypatch):
    called, call = [], waiting_pool.executor._call_deputy
    monkeypatch.setattr(waiting_pool.executor, "_call_deputy", lambda: called.append(1) or call())
    wait_beside(waiting_pool, lambda goal: waiting_pool.engine.works.append(goal.set))
    assert not called


def test_one_thread_is_woken_for_what_a_handler_leaves(waiting_pool, monkeypatch):
    wakers, wake = [], waiting_pool.engine.on_works
    monkeypatch.setattr(waiting_pool.engine, "on_works", lambda: wakers.append(get_ident()) or wake())
    monkeypatch.setattr(waiting_pool.executor, "_wake_one", waiting_pool.engine.on_works)
    wait_beside(waiting_pool, lambda goal: waiting_pool.executor.submit_urgent(goal.set))
    assert wakers.count(get_ident()) == 1


def test_handler_may_wait_for_what_it_has_left(waiting_pool):
    """As a callback that waits for a future whose own callbacks are to run first."""

    def leave_and_wait(goal):
        left = Waiter()
        waiting_pool.executor.submit_urgent(left.set)
        assert waiting_pool.engine.wait(left, monotonic() + LIMIT)
        goal.set()

    wait_beside(waiting_pool, leave_and_wait)


def test_works_left_by_one_message_run_beside_each_other(waiting_pool):
    together = threading.Barrier(3)
    works = waiting_pool.engine.works

    def leave(goal):
        works.extend([lambda: together.wait(LIMIT)] * 2)
        works.append(lambda: together.wait(LIMIT) < 3 and goal.set())

    wait_beside(waiting_pool, leave)


def test_works_that_a_leader_leaves_run_beside_each_other_though_another_leads(waiting_pool):
    """The lead was taken while it handled their message, and the deputy does not look."""
    engine, together, goal = waiting_pool.engine, threading.Barrier(2), Waiter()

    def leave(_arrival):
        until(lambda: engine.is_led() and not engine._executor_leads)
        engine.works.extend([lambda: together.wait(LIMIT), lambda: together.wait(LIMIT) < 2 and goal.set()])

    engine._handle = leave
    until(lambda: engine._executor_leads and engine.is_led())
    engine.submit(0, Outgoing(b"a", []))
    until(lambda: not engine.is_led())
    assert engine.wait(goal, monotonic() + LIMIT)


def test_what_a_handler_leaves_is_run_meanwhile_where_there_is_no_deputy(small_pool):
    """The handler goes on for long, and nobody else looks."""
    over, seen = threading.Event(), []

    def leave(_arrival):
        small_pool.executor.submit_urgent(over.set)
        seen.append(over.wait(LIMIT))

    until(lambda: small_pool.engine._executor_leads)
    assert small_pool.executor._deputy is None
    small_pool.engine._handle = leave
    small_pool.engine.submit(0, Outgoing(b"a", []))
    until(lambda: seen)
    assert seen == [True]
