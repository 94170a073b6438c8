"""Many ranks on one host. Gated by ``MPIRPC_TEST_LARGE=1``: each rank imports torch, a minute in all."""

import os

import pytest

from tests._ranks.launch import run_ranks


@pytest.mark.skipif(
    os.environ.get("MPIRPC_TEST_LARGE") != "1", reason="takes a minute: MPIRPC_TEST_LARGE=1 runs it"
)
def test_start_of_24_ranks_on_a_few_cores():
    """pytorch#85607: init_rpc failed with more than 18 workers on one machine."""
    finished = run_ranks(24, ["tests/programs/ring.py"], timeout=400)
    assert finished.rc == 0, finished.output
    assert "OK: 24 ranks" in finished.output
