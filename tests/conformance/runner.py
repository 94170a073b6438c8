"""Test after test, job after job.

A job is used until it breaks; a test that failed in it is tried once more alone. The outcome of that second
try counts; a test that passes only alone is told apart, since something that ran before it in the same
processes has disturbed it.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.job import Job, JobFailed, Outcome, clean
from tests.conformance.plan import NOT_RUN, Test

BATCH = 120
"""Tests in one job at most."""

MAX_FAILED_STARTS = 3
"""Jobs in a row that may fail to start."""

Record = Callable[[Test, Outcome], None]


@dataclass
class Runner:
    """Runs tests one after another.

    Attributes:
        limit: Seconds per test.
        retry: Whether a test that fails in a used job is tried once more in a new one.
        expected: Tests that are recorded as bad: they are not tried again.
        record: Told each outcome.
        only_alone: Tests that passed in the second try, with the first one's error.
        suite: Every test of the installed suite.
        missing: Private names that the suite imports and nobody provides.
    """

    limit: float
    retry: bool
    expected: Collection[str]
    record: Record
    logs: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="conformance-logs-")))
    num_jobs: int = 0
    bad_exits: int = 0
    only_alone: dict[str, str] = field(default_factory=dict)
    suite: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    _job: Job | None = None

    def run(self, tests: Sequence[Test]) -> None:
        """Run all ``tests``; those with the same number of ranks share jobs."""
        waiting = deque(sorted(tests, key=lambda test: (test.ranks != 4, test.ranks)))
        failed_starts = 0
        try:
            while waiting and failed_starts < MAX_FAILED_STARTS:
                test = waiting.popleft()
                try:
                    outcome = self._run_one(test)
                    failed_starts = 0
                except (JobFailed, OSError) as error:
                    self._drop(kill=True)
                    outcome = Outcome("crash", clean(str(error)))
                    failed_starts += 1
                self.record(test, outcome)
        finally:
            self._drop(kill=bool(waiting))

    def _run_one(self, test: Test) -> Outcome:
        if test.name in NOT_RUN:
            return Outcome("fail", NOT_RUN[test.name])
        outcome = self._run_in_job(test)
        retry = self.retry and test.name not in self.expected and "is not provided" not in outcome.error
        if outcome.is_bad and not outcome.alone and retry:
            self._drop(kill=False)
            first, outcome = outcome, self._run_in_job(test)
            if not outcome.is_bad:
                self.only_alone[test.name] = first.error
        return outcome

    def _run_in_job(self, test: Test) -> Outcome:
        if self._job is not None and self._job.size != test.ranks:
            self._drop(kill=False)
        job = self._job or self._start(test.ranks)
        outcome = job.run(test.name, self.limit)
        if not job.reusable or job.used >= BATCH:
            self._drop(kill=not job.reusable and outcome.is_bad)
        return outcome

    def _start(self, size: int) -> Job:
        self.num_jobs += 1
        job = self._job = Job(size, self.logs / f"job{self.num_jobs:03d}.log")
        self.suite, self.missing = job.tests, job.missing
        return job

    def _drop(self, kill: bool) -> None:
        """Be done with the job, if there is one."""
        job, self._job = self._job, None
        if job is None:
            return
        if kill:
            job.kill()
        elif not job.close():
            self.bad_exits += 1
