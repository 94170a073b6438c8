"""The record of outcomes: what passed when it was last written, and why the rest does not.

``outcomes.csv`` has a line for every test that applies. A test that passes there and not now is a regression.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.conformance.job import Outcome
from tests.conformance.plan import Test

RECORD_FILE = Path(__file__).with_name("outcomes.csv")
STATUSES = ("pass", "fail", "hang", "crash", "skip")


class Recorded(NamedTuple):
    """What the record says of one test."""

    status: str
    reason: str = ""
    """Why it does not pass; empty if it does."""


def read_record(path: Path = RECORD_FILE) -> dict[str, Recorded]:
    """Return the record by test; a missing file is an empty one."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {row["test"]: Recorded(row["outcome"], row["reason"]) for row in csv.DictReader(file)}


def write_record(suite: Mapping[str, Test], record: Mapping[str, Recorded], path: Path = RECORD_FILE) -> None:
    """Write the record, in the suite's order."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["test", "outcome", "reason"])
        for name in suite:
            if name in record:
                writer.writerow([name, *record[name]])


def updated(record: Mapping[str, Recorded], outcomes: Mapping[str, Outcome]) -> dict[str, Recorded]:
    """Return the record with new outcomes; a reason is kept, or begun with the error, while a test is bad."""
    new = dict(record)
    for name, outcome in outcomes.items():
        if outcome.is_bad:
            known = record.get(name)
            reason = known.reason if known and known.status != "pass" and known.reason else outcome.error
            new[name] = Recorded(outcome.status, reason)
        else:
            new[name] = Recorded(outcome.status, outcome.error)
    return new


def regressions(record: Mapping[str, Recorded], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the tests that are bad now and were not, or were never recorded."""
    return [
        name
        for name, outcome in outcomes.items()
        if outcome.is_bad and record.get(name, Recorded("pass")).status not in ("fail", "hang", "crash")
    ]


def improvements(record: Mapping[str, Recorded], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the tests that pass now and are recorded as bad."""
    return [
        name
        for name, outcome in outcomes.items()
        if not outcome.is_bad and record.get(name, Recorded("pass")).status in ("fail", "hang", "crash")
    ]


def table(suite: Mapping[str, Test], outcomes: Mapping[str, Outcome]) -> str:
    """Return counts by category, as text."""
    counts: dict[str, Counter[str]] = {}
    for name, outcome in outcomes.items():
        counts.setdefault(suite[name].category, Counter())[outcome.status] += 1
    counts["total"] = sum(counts.values(), Counter())
    width = max(len(name) for name in counts)
    lines = [f"{'category':<{width}}  tests " + " ".join(f"{status:>5}" for status in STATUSES)]
    for category, count in counts.items():
        cells = " ".join(f"{count[status]:>5}" for status in STATUSES)
        lines.append(f"{category:<{width}}  {count.total():>5} {cells}")
    return "\n".join(lines)
