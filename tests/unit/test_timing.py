"""Unit tests for mpirpc._core.timing: no test here lets time pass, it is handed in."""

import pytest

from mpirpc._core import timing
from mpirpc._core.timing import UNLIMITED, Backoff, deadline_after


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing, "monotonic", lambda: 100.0)


@pytest.fixture
def yields(monkeypatch):
    """How often the thread gave its core away without sleeping."""
    calls = []
    monkeypatch.setattr(timing.os, "sched_yield", lambda: calls.append(1))
    return calls


def test_deadline_is_now_and_the_timeout(clock):
    assert deadline_after(2.5) == 102.5


@pytest.mark.parametrize("timeout", [0, 0.0])
def test_zero_means_no_limit(clock, timeout):
    assert deadline_after(timeout) == UNLIMITED


def test_infinite_timeout(clock):
    assert deadline_after(float("inf")) == UNLIMITED


def test_backoff_does_not_sleep_at_first(yields):
    sleeps = []
    backoff = Backoff(spin=1.0)
    for now in (10.0, 10.5, 10.999):
        backoff.pause(now, sleeps.append, 5.0)
    assert (len(yields), sleeps) == (3, [])


def test_backoff_then_sleeps_in_proportion_up_to_its_limit(yields):
    sleeps = []
    backoff = Backoff(spin=1.0)
    for now in (10.0, 11.0, 26.0, 1000.0):
        backoff.pause(now, sleeps.append, 5.0)
    assert sleeps == [1.0 / 16, 1.0, 5.0]


def test_sleep_that_was_woken_begins_anew(yields):
    backoff = Backoff(spin=1.0)
    backoff.pause(10.0, None, 5.0)
    backoff.pause(20.0, lambda timeout: True, 5.0)
    backoff.pause(30.0, None, 5.0)
    assert len(yields) == 2


def test_without_spinning_it_sleeps_at_once(yields):
    sleeps = []
    Backoff(spin=0.0).pause(10.0, sleeps.append, 5.0)
    assert (yields, sleeps) == ([], [0.0])


def test_wait_for_the_interpreter_is_averaged(monkeypatch):
    clock = iter([1.0, 1.000002, 5.0, 5.000004])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    wait = timing.GilWait()
    assert wait.average_us == 0
    wait.give_way()
    wait.give_way()
    assert wait.average_us == pytest.approx(3.0, abs=1e-3)
