"""Unit tests for mpirpc._core.doorbell: who sleeps is woken, by others and by itself; a bell never blocks."""

import fcntl
import math
import resource
import socket
import threading
from types import SimpleNamespace

import pytest

from mpirpc._core import doorbell
from mpirpc._core.doorbell import Doorbell
from mpirpc._core.waiter import SHORT_SLEEP, Waiter

LONG = 60.0


@pytest.fixture
def bells():
    made = [Doorbell(), Doorbell()]
    yield made
    for bell in made:
        bell.close()


def sleep_on(bell):
    thread = threading.Thread(target=bell.sleep, args=(LONG,))
    thread.start()
    return thread


def test_all_bells_are_found(bells):
    addresses = [bell.address for bell in bells]
    assert all(bell.find(addresses) for bell in bells)


def test_bell_that_is_not_there_is_not_found(bells):
    assert not bells[0].find([bells[0].address, bells[1].address + "x"])


def test_ring_ends_a_sleep(bells):
    bells[0].find([bell.address for bell in bells])
    sleeper = sleep_on(bells[1])
    bells[0].ring(1)
    sleeper.join(LONG / 2)
    assert not sleeper.is_alive()


def test_worker_that_may_sleep_is_woken_and_one_that_is_awake_is_not(bells):
    bells[0].find([bell.address for bell in bells])
    bells[0].rouse(1)
    assert bells[1].sleep(LONG)
    bells[0].awake_until[1] = math.inf
    bells[0].rouse(1)
    assert not bells[1].sleep(0.01)
    bells[0].awake_until[1] = 0.0
    bells[0].rouse(1)
    assert bells[1].sleep(LONG)


def test_ring_before_the_sleep_is_kept_and_counts_once(bells):
    bells[0].ring_here()
    bells[0].ring_here()
    assert bells[0].sleep(LONG)
    assert not bells[0].sleep(0.01)


def test_ring_that_comes_as_the_sleep_ends_is_not_lost(bells, monkeypatch):
    class Late:
        def register(self, *_arguments):
            pass

        def poll(self, _timeout):
            bells[0].ring_here()
            return []

    monkeypatch.setattr(doorbell, "select", SimpleNamespace(poll=Late, POLLIN=1))
    assert bells[0].sleep(0)


def test_bell_works_in_a_process_with_many_open_files(bells):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        low = bells[0]._socket
        bells[0]._socket = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, 1024))
        low.close()
        bells[0].ring_here()
        assert bells[0].sleep(LONG)
        bells[0].close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_full_bell_does_not_block(bells):
    for _ in range(1000):
        bells[0].ring_here()


def test_closing_wakes_the_sleeper_and_later_rings_do_no_harm(bells):
    bells[0].find([bell.address for bell in bells])
    sleeper = sleep_on(bells[1])
    bells[1].close()
    sleeper.join(LONG / 2)
    assert not sleeper.is_alive()
    bells[0].ring(1)
    bells[1].ring_here()
    bells[1].sleep(0)


@pytest.mark.parametrize(
    "wake", [lambda waiter, bell: bell.ring_here(), lambda waiter, bell: waiter.unpark()]
)
def test_waiter_that_rests_is_woken_by_the_bell_and_by_unpark(bells, wake):
    waiter = Waiter()
    resting = threading.Thread(target=waiter.rest, args=(bells[0], LONG))
    resting.start()
    wake(waiter, bells[0])
    resting.join(LONG / 2)
    assert not resting.is_alive()


def test_unpark_before_the_rest_is_kept(bells):
    waiter = Waiter()
    waiter.unpark()
    waiter.rest(bells[0], LONG)


def test_short_rest_needs_no_bell():
    class Silent:
        def sleep(self, _timeout):
            raise AssertionError("a system call for a short sleep")

    Waiter().rest(Silent(), SHORT_SLEEP / 2)
