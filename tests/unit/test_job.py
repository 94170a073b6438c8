"""Unit tests for mpirpc._core.job: the board on which the ranks of a host say that they have failed."""

import mmap

import pytest

from mpirpc._core import job
from mpirpc._core.job import Board, Job, get_job
from mpirpc._core.timing import monotonic


@pytest.fixture
def boards(monkeypatch):
    """The boards of three ranks on one host, and a clock that stands still between steps."""
    slots = mmap.mmap(-1, 24)
    clock = iter(range(100, 200))
    monkeypatch.setattr(job.time, "time_ns", lambda: next(clock))
    return [Board(slots, place) for place in range(3)]


def test_nobody_has_failed_at_first(boards):
    assert not any(board.has_failure() or board.is_first() for board in boards)


def test_all_see_who_failed_first(boards):
    boards[2].post_failure()
    boards[0].post_failure()
    assert [board.is_first() for board in boards] == [False, False, True]
    assert all(board.has_failure() for board in boards)


def test_of_two_at_the_same_time_one_is_first(boards, monkeypatch):
    monkeypatch.setattr(job.time, "time_ns", lambda: 7)
    boards[1].post_failure()
    boards[2].post_failure()
    assert [board.is_first() for board in boards] == [False, True, False]


def test_a_second_failure_of_a_rank_does_not_move_its_time(boards):
    boards[1].post_failure()
    boards[0].post_failure()
    boards[1].post_failure()
    assert boards[1].is_first()


def test_a_job_of_one_rank_agrees_with_itself():
    alone = Job()
    assert (alone.rank, alone.size, alone.local_size, alone.num_hosts, alone.host_index) == (0, 1, 1, 1, 0)
    assert alone.share("text") == "text"
    assert alone.poll_agreement() is None
    alone.post_agreement(3)
    alone.post_agreement(9)
    assert alone.wait_agreement(monotonic() + 60) == 3


def test_a_process_has_one_job():
    assert get_job() is get_job()
