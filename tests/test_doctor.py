"""``python -m mpirpc doctor`` on real ranks; for made-up facts see tests/unit/test_doctor_checks.py."""

import json
import os

import pytest

from tests._ranks.launch import ROOT, is_open_mpi, run_ranks

ENV = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
LIMIT = 150


def test_report_of_a_job():
    finished = run_ranks(2, ["-m", "mpirpc", "doctor"], timeout=LIMIT, env=ENV)
    assert finished.rc == 0, finished.output
    lines = finished.output.splitlines()
    vendor = "Open MPI v" if is_open_mpi() else "MPICH "
    launcher = "mpirun (Open MPI)" if is_open_mpi() else "mpirun (hydra: MPICH or Intel MPI)"
    for start in (
        f"ok MPI {vendor}",
        f"ok launcher {launcher}; MPI sees 2 rank(s)",
        "ok calls all 2 rank(s) answer",
    ):
        assert any(" ".join(line.split()).startswith(start) for line in lines), finished.output
    assert sum("64 MiB to rank 1 and back in" in line for line in lines) == 1
    assert "FAULT" not in finished.output
    assert lines[-1].startswith("doctor: a job started like this works")


def test_json_has_every_rank():
    finished = run_ranks(2, ["-m", "mpirpc", "doctor", "--json"], timeout=LIMIT, env=ENV)
    assert finished.rc == 0, finished.output
    found = json.loads(finished.output)
    assert found["ok"] is True
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    assert all(set(facts["cores"]) <= set(range(os.cpu_count() or 1)) for facts in found["ranks"])
    assert {facts["thread_level"] for facts in found["ranks"]} == {3}
    assert {finding["subject"] for finding in found["findings"]} >= {
        "MPI",
        "calls",
        "large call",
        "small call",
    }


@pytest.mark.parametrize("options", [[], ["--no-calls"]], ids=["calls", "no calls"])
def test_alone_it_tells_to_start_it_on_ranks(options):
    finished = run_ranks(1, ["-m", "mpirpc", "doctor", *options], timeout=LIMIT, env=ENV)
    assert finished.rc == 0, finished.output
    assert "hint: start it as your program: mpirun -n 4 python -m mpirpc doctor" in finished.output
    assert ("small call" in finished.output) == (not options)
