"""The MPI test machinery itself: suites that go wrong on purpose end with a report, not with a hang."""

import pytest

from tests._ranks.launch import ROOT, rank_environment, run_ranks
from tests._ranks.suite import run_suite

SAMPLES = "tests/_ranks/samples"


@pytest.fixture
def sample(tmp_path):
    """Run one of the samples on two ranks."""

    def run(name):
        return run_suite(2, [f"{SAMPLES}/{name}.py"], tmp_path, timeout=60)

    return run


def test_failure_of_one_rank_is_everybodys_and_the_rest_runs(sample, tmp_path):
    run = sample("one_rank_fails")
    outcomes = {result.nodeid.rpartition("::")[2]: result for result in run.results.tests}
    assert {name: result.outcome for name, result in outcomes.items() if result.outcome != "passed"} == {
        "test_call": "failed",
        "test_setup": "failed",
        "test_teardown": "failed",
        "test_skip_on_one_rank": "failed",
        "test_skip_on_all_ranks": "skipped",
        "test_known_failure": "xfailed",
    }
    assert outcomes["test_last"].outcome == "passed"
    assert "call of rank 1" in outcomes["test_call"].text
    assert "printed by rank 1" in outcomes["test_call"].text
    assert run.finished.rc != 0
    assert run.results.finished == 1
    # Only rank 0 prints.
    output = run.finished.output
    assert output.count("short test summary info") == 1
    assert "failed on rank(s) [1] of 2: AssertionError: call of rank 1" in output
    assert "skipped on rank(s) [1] of 2" in output
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]  # no rank's temporary root


def test_group_of_the_next_test_opens_whatever_the_last_did(sample):
    run = sample("group_is_misused")
    failed = {
        result.nodeid.rpartition("::")[2]: result
        for result in run.results.tests
        if result.outcome == "failed"
    }
    assert list(failed) == ["test_fails_on_rank_1_while_others_call", "test_keeps_an_rref"]
    assert "left behind on rank 0: used_rrefs=1" in failed["test_keeps_an_rref"].text
    assert run.results.tests[-1].outcome == "passed"


def test_stuck_rank_ends_the_job_with_all_stacks(sample):
    run = sample("one_rank_is_stuck")
    assert run.finished.rc != 0
    assert not run.finished.timed_out
    assert run.results.running.endswith("test_stuck")
    assert run.results.finished is None
    assert "rank 0 of 2, through the call of" in run.finished.output
    assert "waiting for rank(s) [1]: over 1 s, ending the job" in run.finished.output
    assert "rank 1 of 2, in tests/" in run.finished.output
    assert "one_rank_is_stuck.py" in run.finished.output


def test_rank_stuck_with_the_interpreter_lock_ends_too(sample):
    run = sample("lock_is_held")
    assert run.finished.rc != 0
    assert not run.finished.timed_out
    assert "waiting for rank(s) [1]" in run.finished.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("different_tests", "ranks 0 and 1 collected different tests"),
        ("import_error_on_one_rank", "no import on rank 1"),
        ("misspelt_mark", "the mark mpi takes min_size only, not ['minsize']"),
    ],
)
def test_wrong_collection_ends_the_run_with_the_reason(sample, name, reason):
    run = sample(name)
    assert run.finished.rc != 0
    assert not run.finished.timed_out
    assert reason in run.finished.output


def test_pytest_under_mpirun_needs_with_mpi():
    finished = run_ranks(2, ["-m", "pytest", "-q", f"{SAMPLES}/one_rank_fails.py"], timeout=60)
    assert finished.rc != 0
    assert "needs --with-mpi" in finished.output


def test_run_ranks_ends_what_takes_too_long():
    finished = run_ranks(2, ["-c", "import time; print('begun', flush=True); time.sleep(600)"], timeout=5)
    assert finished.timed_out
    assert finished.rc != 0
    assert "begun" in finished.output


def test_run_ranks_tells_rank_and_exit_status():
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(f'I am {c.rank}/{c.size}'); c.Abort(7)"
    finished = run_ranks(2, ["-c", program], timeout=60)
    assert finished.rc != 0
    assert "/2" in finished.output


def test_rank_environment_forgets_an_outer_job(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    env = rank_environment({"EXTRA": "1"})
    assert "PMIX_RANK" not in env
    assert "OMPI_COMM_WORLD_SIZE" not in env
    assert (env["OMPI_MCA_pml"], env["EXTRA"], env["OMP_NUM_THREADS"]) == ("ob1", "1", "1")


def test_samples_are_all_run():
    assert {path.stem for path in (ROOT / SAMPLES).glob("*.py")} - {"__init__"} == {
        "different_tests",
        "group_is_misused",
        "import_error_on_one_rank",
        "lock_is_held",
        "misspelt_mark",
        "one_rank_fails",
        "one_rank_is_stuck",
    }
