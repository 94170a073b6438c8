"""Run a folder of MPI tests with pytest on n ranks, and read what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests._ranks import results
from tests._ranks.launch import Finished, run_ranks


class SuiteRun(NamedTuple):
    """One run of pytest on several ranks."""

    finished: Finished
    results: results.Results


def run_suite(
    n: int,
    args: Sequence[str],
    scratch: Path,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> SuiteRun:
    """Run ``pytest --with-mpi *args`` on ``n`` ranks.

    ``scratch`` is an empty folder, for the results file and the ranks' temporary folders.
    """
    file = scratch / "results.jsonl"
    argv = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--with-mpi", *args]
    places = {results.VARIABLE: str(file), "PYTEST_DEBUG_TEMPROOT": str(scratch)}
    finished = run_ranks(n, argv, timeout, {**(env or {}), **places})
    return SuiteRun(finished, results.read(file))
