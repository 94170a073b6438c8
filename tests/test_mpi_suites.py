"""Plain ``pytest`` runs the MPI suites too: tests/mpi at two sizes, tests/parity; inner tests are subtests.

``MPIRPC_TEST_SIZES`` (``"2 4"``, of tests/mpi) and ``MPIRPC_TEST_SUITE_LIMIT`` (seconds per folder and size)
change that.
To run one inner test by hand: ``mpirun -n 4 python -m pytest --with-mpi tests/mpi -k NAME``.
"""

import os

import pytest

from tests._ranks.suite import run_suite

SIZES = [int(word) for word in os.environ.get("MPIRPC_TEST_SIZES", "2 4").split()]
LIMIT = float(os.environ.get("MPIRPC_TEST_SUITE_LIMIT", "900"))
SUITES = [*((size, "tests/mpi") for size in SIZES), (2, "tests/parity")]
"""The programs of tests/parity are for two workers."""

END_OF_OUTPUT = 20_000
"""Characters of a broken-off run's output that are shown."""


@pytest.mark.parametrize(("size", "folder"), SUITES)
def test_mpi_suite(size, folder, tmp_path, subtests):
    run = run_suite(size, [folder], tmp_path, timeout=LIMIT)
    for result in run.results.tests:
        with subtests.test(msg=result.nodeid, ranks=size):
            replay(result)
    failed = any(result.outcome == "failed" for result in run.results.tests)
    if run.results.finished is None:
        where = f" in {run.results.running}" if run.results.running else ""
        pytest.fail(
            f"{folder} on {size} ranks broke off{where}\n{run.finished.output[-END_OF_OUTPUT:]}",
            pytrace=False,
        )
    if run.finished.rc and not failed:
        pytest.fail(
            f"{folder} on {size} ranks ended with status {run.finished.rc}\n{run.finished.output}",
            pytrace=False,
        )
    assert run.results.tests, f"{folder} on {size} ranks ran no test"


def replay(result):
    """Do in this test what the inner test did."""
    if result.outcome == "failed":
        pytest.fail(result.text, pytrace=False)
    if result.outcome == "skipped":
        pytest.skip(result.text)
