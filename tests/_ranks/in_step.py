"""A pytest plugin for runs under mpirun: all ranks take each step of each test together.

Plain pytest on several ranks goes wrong as soon as one rank fails alone: it walks on to the next test while
the others still wait for it in this one. With this plugin the ranks tell each other, after every phase
(setup, call, teardown) of every test, how it went:

* a phase that failed on one rank has failed on all, and rank 0 shows the tracebacks of the others;
* ranks that skipped where others did not have failed too;
* a rank that does not come out of a test in time leads to all stacks on standard error and the job's end;
* ranks that collected different tests, or had an import error, end the run together with the reason;
* only rank 0 prints.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import pytest
from mpi4py import MPI

from tests._ranks import results
from tests._ranks.exchange import Exchange
from tests._ranks.watchdog import Watchdog

PATIENCE = float(os.environ.get("MPIRPC_TEST_PATIENCE", "60"))
"""Seconds that a test may take on all ranks; ``@pytest.mark.patience(seconds)`` gives one test more."""

OUT_OF_STEP = 3
"""Exit status when the ranks do not have the same tests."""

PASSED_EVERYWHERE = pytest.StashKey[bool]()
"""On each item: whether all ranks came through all its phases so far. Fixtures read it when they clean up."""


class Writer(Protocol):
    """The part of pytest's terminal writer that a report needs."""

    def line(self, s: str = "") -> None:
        """Write one line."""


class Verdict(NamedTuple):
    """What one rank says about one phase of one test."""

    phase: str
    outcome: str
    reason: str
    text: str


class JointFailure:
    """Stands in for pytest's traceback object in the report of a failure on some ranks."""

    def __init__(self, message: str, text: str) -> None:
        self.text = text
        self.reprcrash = SimpleNamespace(message=message, path="", lineno=0)

    def toterminal(self, tw: Writer) -> None:
        """Write it, as pytest asks."""
        for line in self.text.splitlines():
            tw.line(line)

    def __str__(self) -> str:
        return self.text


def joint_failure(verdicts: list[Verdict]) -> JointFailure | None:
    """Judge one phase over all ranks; None if they all passed, or all skipped."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "failed" in outcomes:
        wrong = "failed"
    elif len(outcomes) > 1:
        wrong = "skipped"
    else:
        return None
    size = len(verdicts)
    bad = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict.outcome == wrong}
    parts = [f"--- rank {rank} of {size}: {wrong} ---\n{verdict.text}" for rank, verdict in bad.items()]
    message = f"{wrong} on rank(s) {list(bad)} of {size}: {next(iter(bad.values())).reason}"
    return JointFailure(message, "\n".join([message, *parts]))


class InStep:
    """The plugin. Making one is collective over ``MPI.COMM_WORLD``, and watched."""

    def __init__(self, config: pytest.Config) -> None:
        self._doing = "joining the others"
        self._rank, self._size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self._exchange: Exchange | None = None
        # Standard error as it is while pytest does not capture.
        self._err = os.fdopen(os.dup(2), "w")
        self._watchdog = Watchdog(self._err, self._describe, lambda: MPI.COMM_WORLD.Abort(1))
        self._watchdog.watch(PATIENCE)
        self._exchange = Exchange()
        self._collect_errors: list[str] = []
        self._seconds = 0.0
        path = os.environ.get(results.VARIABLE)
        self._results = Path(path) if path and self._rank == 0 else None
        if self._rank:
            _silence(config)

    # --- collection ---

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be collected here until the ranks compare."""
        if report.failed:
            self._collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """End the run on all ranks if the ranks cannot run the same tests."""
        nodeids = [item.nodeid for item in session.items]
        told = self._tell((nodeids, self._collect_errors), "collection")
        errors = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(told) for text in texts]
        if errors:
            pytest.exit("tests could not be collected\n" + "\n".join(errors), OUT_OF_STEP)
        for rank, (others, _) in enumerate(told):
            if others != told[0][0]:
                only = sorted(set(others) ^ set(told[0][0])) or "the same in another order"
                pytest.exit(f"ranks 0 and {rank} collected different tests: {only}", OUT_OF_STEP)
        self._watchdog.rest()

    # --- one test ---

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to watch; the patience is for the three phases together."""
        marker = item.get_closest_marker("patience")
        self._doing = f"in the setup of {item.nodeid}"
        self._seconds = time.monotonic()
        self._record({"started": item.nodeid})
        self._watchdog.watch(float(marker.args[0]) if marker else PATIENCE)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note the phase for the watchdog."""
        self._doing = f"in {item.nodeid}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note the phase for the watchdog."""
        self._doing = f"in the teardown of {item.nodeid}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Replace this rank's verdict by everybody's. Outermost, so that skips and xfails are known."""
        report = yield
        verdicts = self._verdicts(report)
        failure = joint_failure(verdicts)
        if failure is not None:
            report.outcome = "failed"
            report.longrepr = failure  # type: ignore[assignment]  # pytest asks for toterminal and __str__ only
        passed = item.stash.get(PASSED_EVERYWHERE, True)
        item.stash[PASSED_EVERYWHERE] = passed and failure is None
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down the outcome that counts: a failure in any phase, else that of the call."""
        if report.outcome != "passed" or report.when == "call":
            self._record(
                {
                    "nodeid": report.nodeid,
                    "outcome": "xfailed" if hasattr(report, "wasxfail") else report.outcome,
                    "text": _text_with_sections(report) if report.failed else _skip_reason(report),
                    "seconds": round(time.monotonic() - self._seconds, 3),
                }
            )

    def pytest_runtest_logfinish(self) -> None:
        """The test is over on all ranks."""
        self._doing = "between tests"
        self._watchdog.rest()

    # --- the end ---

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Watch what is left: the summary and MPI_Finalize."""
        self._record({"finished": int(exitstatus)})
        self._doing = "after the last test"
        self._watchdog.watch(PATIENCE)

    # --- helpers ---

    def _verdicts(self, report: pytest.TestReport) -> list[Verdict]:
        text = _text_with_sections(report) if report.outcome != "passed" else ""
        mine = Verdict(f"{report.when} of {report.nodeid}", report.outcome, _reason(report), text)
        verdicts: list[Verdict] = self._tell(mine, mine.phase)
        phases = [verdict.phase for verdict in verdicts]
        if len(set(phases)) > 1:
            print(f"\nrank {self._rank}: the ranks are out of step: {phases}", file=self._err, flush=True)
            MPI.COMM_WORLD.Abort(OUT_OF_STEP)
        return verdicts

    def _tell(self, mine: Any, what: str) -> list[Any]:
        assert self._exchange is not None
        self._doing = f"through the {what}"
        return [pickle.loads(data) for data in self._exchange.allgather(pickle.dumps(mine))]

    def _describe(self) -> str:
        missing = self._exchange.missing if self._exchange else []
        waiting = f", waiting for rank(s) {missing}" if missing else ""
        return f"rank {self._rank} of {self._size}, {self._doing}{waiting}"

    def _record(self, record: dict[str, Any]) -> None:
        if self._results is not None:
            results.append(self._results, record)


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).partition("\n")[0] if crash is not None else _skip_reason(report)


def _skip_reason(report: pytest.TestReport) -> str:
    longrepr: Any = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else ""


def _text_with_sections(report: pytest.TestReport) -> str:
    sections = [f"--- {name} ---\n{content}" for name, content in report.sections]
    return "\n".join([_skip_reason(report) or report.longreprtext, *sections])


def _silence(config: pytest.Config) -> None:
    """Send this rank's terminal output nowhere. pytest has no setting for it, hence the private names."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = open(os.devnull, "w")
