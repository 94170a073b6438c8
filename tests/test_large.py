"""What takes a minute or more, and gigabytes; runs with ``MPIRPC_TEST_LARGE=1``."""

import os

import pytest

from tests._ranks.launch import run_ranks
from tests._ranks.suite import run_suite

pytestmark = pytest.mark.skipif(
    os.environ.get("MPIRPC_TEST_LARGE") != "1", reason="takes minutes: MPIRPC_TEST_LARGE=1 runs it"
)


def test_start_of_24_ranks_on_a_few_cores():
    """pytorch#85607: init_rpc failed with more than 18 workers on one machine."""
    finished = run_ranks(24, ["tests/programs/ring.py"], timeout=400)
    assert finished.rc == 0, finished.output
    assert "OK: 24 ranks" in finished.output


def test_more_than_2_gib_in_one_call(tmp_path):
    run = run_suite(2, ["tests/mpi/test_field_large.py"], tmp_path, timeout=600)
    assert [test.nodeid for test in run.results.tests if test.outcome == "failed"] == [], run.finished.output
    assert any(test.outcome == "passed" for test in run.results.tests), run.finished.output
