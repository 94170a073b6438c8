"""torch's own RPC tests: a quick part in every run; ``python -m tests.conformance --all`` runs the rest."""

import pytest

from tests.conformance.job import Outcome
from tests.conformance.outcomes import Recorded, improvements, read_record, regressions, table, updated
from tests.conformance.plan import QUICK, choose, read_suite
from tests.conformance.runner import Runner

SUITE = read_suite()
LIMIT = 60.0
"""Seconds per test."""


def test_quick_part(subtests, tmp_path):
    outcomes = {}
    runner = Runner(
        LIMIT, True, (), lambda test, outcome: outcomes.update({test.name: outcome}), logs=tmp_path
    )
    runner.run(choose(SUITE, QUICK))
    for name, outcome in outcomes.items():
        with subtests.test(msg=name):
            assert not outcome.is_bad, f"{outcome.status}: {outcome.error}"
    assert len(outcomes) == len(choose(SUITE, QUICK))
    assert runner.bad_exits == 0


# --- the record ---


def test_every_test_that_applies_is_recorded():
    assert sorted(read_record()) == sorted(test.name for test in choose(SUITE))


def test_whatever_does_not_pass_has_a_reason():
    bare = [name for name, found in read_record().items() if found.status != "pass" and not found.reason]
    assert bare == []


def test_nothing_is_recorded_as_hanging():
    assert [name for name, found in read_record().items() if found.status in ("hang", "crash")] == []


def test_the_quick_part_passes_in_the_record():
    record = read_record()
    assert [test.name for test in choose(SUITE, QUICK) if record[test.name].status != "pass"] == []


@pytest.mark.parametrize(
    ("recorded", "now", "worse", "better"),
    [
        ("pass", "fail", True, False),
        ("pass", "pass", False, False),
        ("fail", "hang", False, False),
        ("fail", "pass", False, True),
        (None, "crash", True, False),
    ],
)
def test_what_is_worse_than_recorded(recorded, now, worse, better):
    record = {"A.test": Recorded(recorded, "why")} if recorded else {}
    outcomes = {"A.test": Outcome(now, "how")}
    assert bool(regressions(record, outcomes)) is worse
    assert bool(improvements(record, outcomes)) is better


def test_a_reason_stays_while_a_test_fails_and_goes_when_it_passes():
    record = {"A.test": Recorded("fail", "why")}
    assert updated(record, {"A.test": Outcome("fail", "how")}) == record
    assert updated(record, {"A.test": Outcome("pass")}) == {"A.test": Recorded("pass")}
    assert updated({}, {"A.test": Outcome("fail", "how")}) == {"A.test": Recorded("fail", "how")}


def test_counts_by_category():
    lines = table(SUITE, {"RpcTest.test_add": Outcome("pass"), "RpcTest.test_all_gather": Outcome("fail")})
    assert [line.split() for line in lines.splitlines()][1:] == [
        ["rpc-core", "1", "1", "0", "0", "0", "0"],
        ["lifecycle", "1", "0", "1", "0", "0", "0"],
        ["total", "2", "1", "1", "0", "0", "0"],
    ]
