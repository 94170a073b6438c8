"""Unit tests for mpirpc._core.progress: who polls, who is woken, what happens if the network refuses."""

import threading

import pytest

from mpirpc._core.progress import ProgressEngine
from mpirpc._core.timing import UNLIMITED, monotonic
from mpirpc._core.transport import Arrival, Outgoing
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc._core.waiter import Waiter
from mpirpc.errors import NotInitializedError, TransportError

PAST = 0.0
"""A deadline that has passed."""

LIMIT = 30.0
"""Seconds after which a test gives up waiting for a thread."""


class Side:
    """An engine whose handler notes heads and sets the goal of that name."""

    def __init__(self, network, rank):
        self.transport = LoopbackTransport(network, rank)
        self.engine = ProgressEngine(self.transport, self._handle, spin_time=1e-3, idle_sleep=1e-3)
        self.heads = []
        self.goals = {}
        self.also = lambda head: None

    def goal(self, name):
        return self.goals.setdefault(name, Waiter())

    def _handle(self, arrival):
        head = bytes(arrival.head).decode()
        self.heads.append(head)
        self.also(head)
        if head in self.goals:
            self.goals[head].set()


@pytest.fixture
def network():
    return LoopbackNetwork(2)


@pytest.fixture
def sides(network):
    return [Side(network, rank) for rank in range(2)]


def send(side, dest, head):
    side.engine.submit(dest, Outgoing(head.encode(), []))


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread):
    thread.join(LIMIT)
    return not thread.is_alive()


# --- Waiter ---


def test_waiter_set_before_park():
    waiter = Waiter()
    waiter.set()
    waiter.set()
    assert waiter.done
    assert waiter.park(LIMIT)
    assert not waiter.park(0)


def test_wake_up_just_before_or_while_the_parking_is_made_is_not_lost():
    """The lock is made by the first thread that parks, which may be when another one looks for it."""
    begin, waiters = threading.Barrier(2), [Waiter() for _ in range(500)]

    def wake():
        for waiter in waiters:
            begin.wait(LIMIT)
            waiter.unpark()

    waker = in_thread(wake)
    woken = 0
    for waiter in waiters:
        begin.wait(LIMIT)
        woken += waiter.park(LIMIT)
    waker.join(LIMIT)
    assert woken == len(waiters)


def test_waiter_wakes_a_parked_thread():
    waiter = Waiter()
    thread = in_thread(lambda: waiter.park(LIMIT))
    waiter.unpark()
    assert joined(thread)
    assert not waiter.done


def test_waiter_takes_any_timeout():
    waiter = Waiter()
    assert not waiter.park(-1.0)
    waiter.unpark()
    assert waiter.park(UNLIMITED)


# --- one thread ---


def test_message_leaves_at_once(sides, network):
    network.hold()
    send(sides[0], 1, "a")
    assert len(network.held) == 1


def test_wait_moves_the_network(sides):
    send(sides[0], 1, "a")
    assert sides[1].engine.wait(sides[1].goal("a"))
    assert sides[1].heads == ["a"]
    assert not sides[1].engine.is_led()


def test_wait_gives_up_at_the_deadline(sides):
    assert not sides[1].engine.wait(sides[1].goal("never"), PAST)
    assert not sides[1].engine.is_led()


def test_wait_for_what_is_done_does_not_poll(sides):
    send(sides[0], 1, "a")
    done = Waiter()
    done.set()
    assert sides[1].engine.wait(done)
    assert sides[1].heads == []


def test_handlers_hold_neither_lock_nor_lead(sides):
    """A handler may send, and may even wait for something else to arrive."""

    def handle(head):
        if head == "outer":
            send(sides[1], 0, "answer")
            assert sides[1].engine.wait(sides[1].goal("inner"), PAST) is False
            send(sides[0], 1, "inner")
            assert sides[1].engine.wait(sides[1].goal("inner"))

    sides[1].also = handle
    send(sides[0], 1, "outer")
    assert sides[1].engine.wait(sides[1].goal("outer"))
    assert sides[0].engine.wait(sides[0].goal("answer"))


def test_messages_of_a_handler_leave_before_it_returns(sides, network):
    network.hold(lambda source, dest, head: source == 1)
    left = []

    def handle(head):
        send(sides[1], 0, "answer")
        left.append(len(network.held))

    sides[1].also = handle
    send(sides[0], 1, "a")
    sides[1].engine.wait(sides[1].goal("a"))
    assert left == [1]


def test_handler_may_wait_for_what_came_with_its_message(sides, monkeypatch):
    """As a callback that waits for another call, whose response came at the same time."""
    side, batches = sides[0], [[Arrival(1, bytearray(b"first"), []), Arrival(1, bytearray(b"second"), [])]]
    monkeypatch.setattr(side.transport, "poll", lambda: batches.pop() if batches else ())
    second, found = side.goal("second"), []
    side.also = lambda head: (
        found.append(side.engine.wait(second, monotonic() + LIMIT)) if head == "first" else None
    )
    assert side.engine.wait(side.goal("first"))
    assert found == [True]
    assert not side.engine.has_in_hand


def test_chores_are_carried_out_by_the_leader(sides):
    engine, done = sides[0].engine, Waiter()
    order = []
    engine.chores.extend([(order.append, 1), (order.append, 2), (lambda _: done.set(), None)])
    assert engine.wait(done)
    assert (order, len(engine.chores)) == ([1, 2], 0)


def test_alarm_rings_and_says_when_next(sides):
    engine, rung = sides[0].engine, Waiter()
    engine.on_alarm = lambda now: rung.set() or now + 0.5
    engine.alarm_at = PAST
    assert engine.wait(rung)
    assert PAST < engine.alarm_at < UNLIMITED


def test_alarm_without_a_next_looks_again_all_the_same(sides):
    engine, rung = sides[0].engine, Waiter()
    engine.on_alarm = lambda now: rung.set() or UNLIMITED
    engine.alarm_at = PAST
    engine.wait(rung)
    assert engine.alarm_at < UNLIMITED


def test_works_that_a_waiting_thread_receives_are_told(sides):
    told = []
    sides[1].also = lambda head: sides[1].engine.works.append(lambda: None)
    sides[1].engine.on_works = lambda: told.append(1)
    send(sides[0], 1, "a")
    sides[1].engine.wait(sides[1].goal("a"))
    assert told == [1]


def test_vacant_lead_is_told(sides):
    vacant = []
    sides[1].engine.on_vacant = lambda: vacant.append(1)
    sides[1].engine.wait(sides[1].goal("a"), PAST)
    assert vacant == [1]


# --- several threads ---


def test_follower_is_woken_by_the_leader(sides):
    """One thread leads and handles the message that the other waits for."""
    first, second = sides[1].goal("first"), sides[1].goal("second")
    threads = [in_thread(lambda goal=goal: sides[1].engine.wait(goal)) for goal in (first, second)]
    send(sides[0], 1, "second")
    send(sides[0], 1, "first")
    assert all(joined(thread) for thread in threads)


def test_many_threads_hand_the_lead_on(sides):
    """Whoever leads is done at some time: each time another thread must take over."""
    goals = [sides[1].goal(str(number)) for number in range(20)]
    threads = [in_thread(lambda goal=goal: sides[1].engine.wait(goal)) for goal in goals]
    for number in range(20):
        send(sides[0], 1, str(number))
        assert joined(threads[number])
    assert not sides[1].engine.is_led()


def test_many_threads_send_at_once(sides):
    def sender(number):
        for i in range(50):
            send(sides[0], 1, f"{number}.{i}")

    threads = [in_thread(lambda number=number: sender(number)) for number in range(8)]
    assert all(joined(thread) for thread in threads)
    send(sides[0], 1, "last")
    sides[1].engine.wait(sides[1].goal("last"))
    assert len(set(sides[1].heads)) == 401


class DeepBell:
    """A bell beside which a leader sleeps until it is rung, however long it meant to sleep."""

    def __init__(self):
        self.asleep, self.rung = threading.Event(), threading.Event()

    def sleep(self, _timeout):
        self.asleep.set()
        return self.rung.wait(LIMIT)

    def ring_here(self):
        self.rung.set()


def test_what_another_thread_sends_wakes_a_leader_beside_its_bell(sides):
    """Who answers soon does not ring: it takes a worker that has just sent something to be awake."""
    bell = sides[0].transport.bell = DeepBell()
    thread = in_thread(lambda: sides[0].engine.wait(sides[0].goal("answer")))
    assert bell.asleep.wait(LIMIT)
    send(sides[0], 1, "question")
    assert bell.rung.is_set()
    send(sides[1], 0, "answer")
    assert joined(thread)


# --- refusals ---


def test_refusal_of_what_waited_in_the_outbox_is_told(sides, monkeypatch):
    engine, told = sides[0].engine, []
    engine.on_works = lambda: told.append(len(engine.urgent))
    error = TransportError("no")
    monkeypatch.setattr(sides[0].transport, "post_send", lambda dest, message: (_ for _ in ()).throw(error))
    with engine._lock:
        engine.submit(1, Outgoing(b"a", [], lambda error: None))
    assert told == []
    engine.wait(Waiter(), PAST)
    assert told == [1]


def test_refused_message_fails_alone(sides, monkeypatch):
    engine, failed = sides[0].engine, []
    error = TransportError("no")
    monkeypatch.setattr(sides[0].transport, "post_send", lambda dest, message: (_ for _ in ()).throw(error))
    engine.submit(1, Outgoing(b"a", [], failed.append))
    engine.submit(1, Outgoing(b"b", []))
    assert failed == []
    (report,) = engine.urgent
    report()
    assert failed == [error]
    assert engine.failure is None


def test_lead_that_was_offered_is_passed_on_by_a_thread_whose_time_is_over(sides):
    engine, vacant = sides[0].engine, []
    engine.on_vacant = lambda: vacant.append(True)

    class Late(Waiter):
        def park(self, timeout):
            engine._followers.popleft()  # what a thread that gives the lead up does
            engine._lead.release()
            return False

    assert engine.try_lead()
    assert not engine.wait(Late(), PAST)
    assert vacant == [True]


def test_failing_network_is_told_once(sides, monkeypatch):
    engine, failed = sides[0].engine, []
    engine.on_failure = failed.append
    error = TransportError("gone")
    monkeypatch.setattr(sides[0].transport, "poll", lambda: (_ for _ in ()).throw(error))
    for _ in range(3):
        engine.wait(Waiter(), PAST)
    for work in list(engine.urgent):
        work()
    assert (engine.failure, failed) == (error, [error])


# --- sums and the end ---


def test_sums_over_all_workers(sides):
    waiters = [side.engine.post_sum([rank + 1, 10]) for rank, side in enumerate(sides)]
    thread = in_thread(lambda: sides[0].engine.wait(waiters[0]))
    assert sides[1].engine.wait(waiters[1])
    assert joined(thread)
    assert [side.engine.sums for side in sides] == [[3, 20]] * 2


def test_what_waits_in_the_outbox_leaves_before_the_end(sides):
    """As the word that this worker leaves, when another thread has just looked at the network."""
    first, second = sides
    with first.engine._lock:
        send(first, 1, "leave")
    first.engine.close(graceful=False)
    assert [bytes(arrival.head) for arrival in second.transport.poll()] == [b"leave"]


def test_messages_after_the_end_are_refused(sides):
    failed = []
    sides[0].engine.close(graceful=True)
    sides[0].engine.submit(1, Outgoing(b"a", [], failed.append))
    assert [type(error) for error in failed] == [NotInitializedError]


def test_nothing_is_polled_after_the_end(sides):
    sides[1].engine.close(graceful=True)
    send(sides[0], 1, "a")
    with pytest.raises(NotInitializedError, match="while this thread waited"):
        sides[1].engine.wait(sides[1].goal("a"))
    assert sides[1].heads == []
