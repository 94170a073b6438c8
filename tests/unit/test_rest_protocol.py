"""Unit tests for mpirpc._core.rest_protocol (guarantees F4, F5 in docs/design/failure.md)."""

import pytest

from mpirpc._core.messages import RestReport
from mpirpc._core.rest_protocol import RestTable, view_of

NONE, ONE_DEAD = frozenset(), frozenset({1})


@pytest.fixture
def table():
    """Worker 0 of three, in its first phase."""
    made = RestTable(3)
    made.begin()
    return made


def report(number, sent, received, busy=False, lost=NONE, phase=1):
    return RestReport(phase, view_of(lost), number, sent, received, busy)


def add_all(table, number, *counts, lost=NONE, busy=()):
    """Reports of the living workers in order of rank."""
    living = [rank for rank in range(3) if rank not in lost]
    for rank, (sent, received) in zip(living, counts, strict=True):
        table.add(rank, report(number, sent, received, rank in busy, lost))


def test_twice_the_same_with_nothing_under_way_is_rest(table):
    add_all(table, 1, (2, 1), (0, 1), (0, 0))
    assert not table.judge(NONE, 1)
    add_all(table, 2, (2, 1), (0, 1), (0, 0))
    assert table.judge(NONE, 2)
    assert table.is_over


def test_a_message_under_way_is_no_rest(table):
    for number in (1, 2):
        add_all(table, number, (2, 0), (0, 1), (0, 0))
        assert not table.judge(NONE, number)


def test_a_busy_worker_is_no_rest(table):
    for number in (1, 2):
        add_all(table, number, (1, 0), (0, 1), (0, 0), busy={2})
        assert not table.judge(NONE, number)


def test_a_change_in_between_is_no_rest(table):
    """A message went and came between the two looks: it may have set off another."""
    add_all(table, 1, (0, 0), (0, 0), (0, 0))
    add_all(table, 2, (1, 0), (0, 1), (0, 0))
    table.judge(NONE, 1)
    assert not table.judge(NONE, 2)


def test_the_first_report_alone_is_not_enough(table):
    add_all(table, 1, (0, 0), (0, 0), (0, 0))
    assert not table.judge(NONE, 1)


# --- deaths ---


def test_a_report_of_the_dead_is_not_waited_for(table):
    table.add(0, report(1, 0, 0, lost=ONE_DEAD))
    assert not table.is_complete(ONE_DEAD, 1)
    table.add(2, report(1, 0, 0, lost=ONE_DEAD))
    assert table.is_complete(ONE_DEAD, 1)


def test_reports_of_different_views_do_not_count_together(table):
    """Worker 2 has not heard of the death: its sums still hold what went to worker 1."""
    table.add(0, report(1, 0, 0, lost=ONE_DEAD))
    table.add(2, report(1, 5, 0))
    assert not table.is_complete(ONE_DEAD, 1)
    assert not table.is_complete(NONE, 1)


def test_counting_begins_anew_with_a_new_view(table):
    add_all(table, 1, (0, 0), (0, 0), (0, 0))
    add_all(table, 2, (0, 0), (0, 0), lost=ONE_DEAD)
    assert not table.judge(ONE_DEAD, 2)


# --- F4: who knows tells, and is believed ---


def test_the_word_of_another_ends_the_phase(table):
    table.on_at_rest(1)
    assert table.is_over


def test_word_and_reports_of_the_next_phase_may_come_early(table):
    table.on_at_rest(2)
    table.add(1, report(1, 0, 0, phase=2))
    assert table.is_over  # who is through the second phase has seen the first
    table.begin()
    table.add(0, report(1, 0, 0, phase=2))
    table.add(2, report(1, 0, 0, phase=2))
    assert table.is_complete(NONE, 1)


def test_old_reports_are_dropped(table):
    add_all(table, 1, (0, 0), (0, 0), (0, 0))
    table.begin()
    table.add(1, report(1, 0, 0, phase=1))
    assert repr(table) == "<RestTable phase=2 over=False reports=0>"


def test_views_have_names_of_their_own():
    views = [(), (0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2), (12,), (1, 2, 12)]
    assert len({view_of(view) for view in views}) == len(views)
    assert view_of([2, 1]) == view_of({1, 2})
