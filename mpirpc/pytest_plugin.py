"""pytest for programs that use mpirpc: tests on several ranks from plain ``pytest``, an RPC group for each.

Switch it on in the top ``conftest.py``: ``pytest_plugins = ["mpirpc.pytest_plugin"]``. How it is used:
``docs/testing.md``.

``@pytest.mark.ranks(4)`` runs a test on four ranks of a job of its own. The outer pytest, which runs on no
rank, starts the launcher with an inner pytest on each rank that runs this test alone and leaves its reports
in a folder; the outer one makes one report of them. A rank that has failed gives the others a short time to
tell how they fare, then ends the job; a job that is not over in time is ended from outside. Under mpirun (a
run of pytest-mpi) the test runs right there, if the number of ranks is right.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from mpirpc._core.job import get_job
from mpirpc._core.rank_launcher import Finished, run_on_ranks
from mpirpc.api import barrier, init_rpc, shutdown
from mpirpc.options import MPIRpcBackendOptions

__all__ = ["RpcWorld", "rpc_world"]

TIMEOUT = 60.0
"""Seconds that a test may take, the start of its ranks included; ``ranks(n, timeout=...)`` sets another."""

STACKS_AT = 0.8
"""The part of this time after which a rank writes down where its threads are."""

OTHERS = 3.0
"""Seconds that the other ranks have to end when one has failed."""

FOLDER = "MPIRPC_PYTEST_FOLDER"
"""Environment variable by which an inner pytest knows where its reports go."""

STACKS = "MPIRPC_PYTEST_STACKS"
"""Environment variable: when an inner pytest writes down its stacks, in seconds since the epoch."""

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
"""A rank started by mpirun or srun has at least one of these variables."""

_HAS_FAILED = pytest.StashKey[bool]()


# --- the group around a test ---


@dataclass(frozen=True)
class RpcWorld:
    """The RPC group of all ranks, as one rank sees it.

    Attributes:
        rank: This worker's rank, which is its id.
        size: Number of workers.
        names: Their names by rank: ``worker0``, ``worker1``, ...
    """

    rank: int
    size: int
    names: list[str]

    @property
    def name(self) -> str:
        """This worker's name."""
        return self.names[self.rank]

    @property
    def next(self) -> str:
        """Name of the worker after this one; the first one's after the last."""
        return self.names[(self.rank + 1) % self.size]

    def barrier(self, timeout: float = 0) -> None:
        """Wait for all ranks; calls are served meanwhile. ``timeout`` is in seconds, 0 means none."""
        barrier(timeout=timeout)


@pytest.fixture
def rpc_world(request: pytest.FixtureRequest) -> Iterator[RpcWorld]:
    """Open an RPC group of all ranks around one test.

    All ranks run the test; one that has nothing to do returns at once, and serves calls until the others are
    done. ``@pytest.mark.rpc_options(...)`` sets the group's ``MPIRpcBackendOptions``. After a test that
    failed on this rank the group is left without waiting for anything, so that the others do not wait either.
    """
    job = get_job()
    names = [f"worker{rank}" for rank in range(job.size)]
    marker = request.node.get_closest_marker("rpc_options")
    options = MPIRpcBackendOptions(**(marker.kwargs if marker else {}))
    init_rpc(names[job.rank], rpc_backend_options=options)
    yield RpcWorld(job.rank, job.size, names)
    shutdown(graceful=not request.node.stash.get(_HAS_FAILED, False))


# --- both sides ---


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks; on a rank, set its temporary folder; on an inner one, begin to write reports."""
    config.addinivalue_line("markers", "ranks(n, timeout=60): run this test on n ranks of a job of its own")
    config.addinivalue_line("markers", "rpc_options(**options): MPIRpcBackendOptions of rpc_world's group")
    if folder := os.environ.get(FOLDER):
        own = Path(folder) / f"rank{get_job().rank}"
        own.mkdir()
        config.option.basetemp = str(own / "tmp")
        config.pluginmanager.register(_Inner(config, Path(folder)), "mpirpc-inner-rank")
    elif any(name in os.environ for name in LAUNCHED):
        config.option.basetemp = _own_basetemp(config)


def _own_basetemp(config: pytest.Config) -> str:
    """Return this rank's base of ``tmp_path``.

    The ranks of a job must not share one, nor pytest's default: each would remove what others look at.
    """
    if given := config.getoption("basetemp", None):
        return f"{given}-rank{get_job().rank}"
    folder = tempfile.mkdtemp(prefix="mpirpc-pytest-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return os.path.join(folder, "tmp")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting that names the launcher."""
    parser.addini("mpirpc_launcher", "launcher of tests marked ranks(n), up to its option -n", default="")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the fixtures whether the test has failed here."""
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


class _Ranks(NamedTuple):
    """What a mark ``ranks`` says."""

    num_ranks: int
    timeout: float


def _read_mark(item: pytest.Item) -> _Ranks | None:
    marker = item.get_closest_marker("ranks")
    if marker is None:
        return None

    def ranks(n: int, timeout: float = TIMEOUT) -> _Ranks:
        return _Ranks(n, timeout)

    return ranks(*marker.args, **marker.kwargs)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse marks that are written wrongly."""
    for item in items:
        try:
            ranks = _read_mark(item)
        except TypeError as error:
            raise pytest.UsageError(f"{item.nodeid}: wrong mark: {error}") from None
        if ranks is not None and (not isinstance(ranks.num_ranks, int) or ranks.num_ranks < 1):
            raise pytest.UsageError(f"{item.nodeid}: wrong mark: ranks({ranks.num_ranks!r})")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Under mpirun: skip a test that needs another number of ranks."""
    ranks = _read_mark(item)
    if ranks is not None and get_job().size != ranks.num_ranks:
        pytest.skip(f"needs {ranks.num_ranks} ranks, this job has {get_job().size}")


# --- outer: no rank ---


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test on its ranks, and report."""
    ranks = _read_mark(item)
    if ranks is None or any(name in os.environ for name in LAUNCHED):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    start = time.time()
    # Not removed here: the ranks' tmp_path are in it, and pytest keeps those of its last runs. Only fixtures
    # get the factory otherwise.
    folder = item.config._tmp_path_factory.mktemp("ranks")  # type: ignore[attr-defined]
    finished = _launch(item, ranks, folder)
    report = _merge(item, ranks, folder, finished)
    report.start, report.stop = start, time.time()
    report.duration = report.stop - start
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _launch(item: pytest.Item, ranks: _Ranks, folder: Path) -> Finished:
    config = item.config
    plugins = [name for name in config.getoption("plugins") or [] if name != "xdist"]
    argv = ["-m", "pytest", "-q", "--color=no", "--no-header", "--no-summary"]
    argv += ["-p", "no:cacheprovider", "-o", "addopts="]
    argv += [f"--rootdir={config.rootpath}", f"--import-mode={config.getoption('importmode')}"]
    argv += [word for name in [__name__, *plugins] for word in ("-p", name)]
    argv += ["-c", str(config.inipath)] if config.inipath else []
    path, separator, rest = item.nodeid.partition("::")
    argv.append(f"{config.rootpath / path}{separator}{rest}")
    changes = {
        FOLDER: str(folder),
        STACKS: str(time.time() + ranks.timeout * STACKS_AT),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *_import_path()])),
    }
    cwd = str(config.invocation_params.dir)
    launcher = shlex.split(config.getini("mpirpc_launcher"))
    return run_on_ranks(ranks.num_ranks, argv, ranks.timeout, changes, cwd, launcher)


def _import_path() -> list[str]:
    """Return where this mpirpc is, should it not be installed."""
    return [str(Path(__file__).resolve().parents[1])]


def _merge(item: pytest.Item, ranks: _Ranks, folder: Path, finished: Finished) -> pytest.TestReport:
    """Make one report of those that the ranks left."""
    told = [_read_reports(item.config, folder / f"rank{rank}.jsonl") for rank in range(ranks.num_ranks)]
    problems = {
        rank: problem
        for rank, reports in enumerate(told)
        if (problem := _problem_of(reports, finished, ranks, folder / f"stacks{rank}.txt"))
    }
    skipped = [report for reports in told for report in reports if report.skipped]
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    longrepr: Any = None
    if problems:
        shown = sorted(problems, key=lambda rank: ("WorkerLostError" in problems[rank], rank))  # causes first
        parts = [f"--- rank {rank} of {ranks.num_ranks} ---\n{problems[rank]}" for rank in shown]
        outcome, longrepr = "failed", f"failed on rank(s) {sorted(problems)}\n" + "\n".join(parts)
    elif len(skipped) == ranks.num_ranks:
        outcome, longrepr = "skipped", skipped[0].longrepr
        longrepr = tuple(longrepr) if isinstance(longrepr, list) else longrepr  # JSON has no tuples
    elif skipped:
        outcome, longrepr = "failed", f"skipped on {len(skipped)} of {ranks.num_ranks} ranks only"
    sections = [("what the ranks wrote", finished.output)] if outcome == "failed" else []
    keywords = dict(item.keywords)
    report = pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, longrepr, when="call", sections=sections
    )
    if outcome == "skipped" and hasattr(skipped[0], "wasxfail"):
        report.wasxfail = skipped[0].wasxfail
    return report


def _read_reports(config: pytest.Config, path: Path) -> list[pytest.TestReport]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        config.hook.pytest_report_from_serializable(config=config, data=json.loads(line)) for line in lines
    ]


def _text_of(report: pytest.TestReport) -> str:
    sections = [f"- {name} -\n{content}" for name, content in report.sections]
    return "\n".join([report.longreprtext, *sections])


def _problem_of(reports: list[pytest.TestReport], finished: Finished, ranks: _Ranks, stacks: Path) -> str:
    """Say what went wrong on one rank; nothing if it came through."""
    failed = [report for report in reports if report.failed]
    if failed:
        return "\n".join(f"in {report.when}:\n{_text_of(report)}" for report in failed)
    if any(report.when == "teardown" for report in reports):
        return ""
    did = f"after {reports[-1].when}" if reports else "before the test began"
    if finished.timed_out:
        shown = stacks.read_text(encoding="utf-8") if stacks.exists() else ""
        return f"not done in {ranks.timeout:g} s; stopped {did}\n{shown}"
    return f"ended {did}; the launcher's exit status is {finished.status}"


# --- inner: one rank ---


class _Inner:
    """Writes this rank's reports, and ends the job if the test fails here and the others wait.

    Args:
        config: Serializes reports.
        folder: Where they go: a file for each rank.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._job = get_job()
        self._has_failed = False
        self._stacks = (folder / f"stacks{self._job.rank}.txt").open("w")
        faulthandler.dump_traceback_later(self._seconds_left(), file=self._stacks)

    @staticmethod
    def _seconds_left() -> float:
        return max(0.1, float(os.environ[STACKS]) - time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write it down."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with (self._folder / f"rank{self._job.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")
        self._has_failed = self._has_failed or report.failed

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Meet the others, or end the job."""
        faulthandler.cancel_dump_traceback_later()
        self._job.post_agreement(int(exitstatus))
        patience = OTHERS if self._has_failed or exitstatus else self._seconds_left()
        if self._job.wait_agreement(time.monotonic() + patience) is None:
            sys.stdout.flush()
            self._job.abort(1)
            os._exit(1)  # MPICH: MPI_Abort may return before the launcher has ended this process
