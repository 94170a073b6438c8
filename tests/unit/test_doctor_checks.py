"""Unit tests for mpirpc.cli.doctor_checks: made-up facts, and what is found in them."""

from dataclasses import replace

import pytest

from mpirpc.cli import doctor_checks as checks
from mpirpc.cli.doctor import as_json, as_report
from mpirpc.cli.doctor_checks import FAULT, NOTE, OK, WARNING, Facts, find_all, ranks_text, size_text

VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "mpi4py": "4.1.2", "numpy": "2.4.6", "mpirpc": "0.1.0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


def job(size=4, **changes):
    """A healthy job of ranks with two cores each on one host; with changes for all."""
    ranks = [
        Facts(
            rank=rank,
            size=size,
            host="n0",
            environ={**OMPI, "OMPI_COMM_WORLD_SIZE": str(size)},
            library="Open MPI v5.0.11",
            standard="3.1",
            cores=(2 * rank, 2 * rank + 1),
            host_cores=16,
            memlock=-1,
            versions=VERSIONS,
        )
        for rank in range(size)
    ]
    return [replace(facts, **changes) for facts in ranks]


def found(everyone, level):
    """Subjects of the findings of a level."""
    return [finding.subject for finding in find_all(everyone) if finding.level == level]


def only(everyone, level, subject):
    (finding,) = (f for f in find_all(everyone) if (f.level, f.subject) == (level, subject))
    return finding


def test_a_healthy_job_has_nothing_but_ok():
    assert {finding.level for finding in find_all(job())} == {OK}


def test_all_that_is_not_ok_has_a_mend():
    strange = {
        "thread_level": 0,
        "memlock": 65536,
        "open_files": 256,
        "shm_nbytes": 1 << 20,
        "cma": "Operation not permitted",
        "cores": (0,),
        "environ": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    }
    findings = find_all(job(1, **strange))
    assert {finding.level for finding in findings} >= {OK, NOTE, WARNING, FAULT}
    assert [finding for finding in findings if finding.level != OK and not finding.mend] == []


@pytest.mark.parametrize(
    ("environ", "mend"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "--mpi=pmix"),
        (OMPI, "install one MPI only"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, "install one MPI only"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4"}, "start it without torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "mpirun -n 4"),
    ],
)
def test_a_job_that_mpi_does_not_know_of_is_a_fault(environ, mend):
    finding = only(job(1, environ=environ), FAULT, "launcher")
    assert mend in finding.mend
    assert finding.text


def test_one_rank_is_noted():
    assert found(job(1, environ={}), NOTE) == ["ranks"]
    finding = only(job(1, environ={"SLURM_NTASKS": "4"}), NOTE, "ranks")
    assert "a Slurm job of 4 tasks" in finding.text


def test_variables_that_mislead_torch_are_a_warning():
    everyone = job()
    everyone[2] = replace(everyone[2], environ={**everyone[2].environ, "RANK": "0", "WORLD_SIZE": "4"})
    assert "on rank 2" in only(everyone, WARNING, "launcher").text


@pytest.mark.parametrize(("level", "kind"), [(0, FAULT), (1, FAULT), (2, NOTE), (3, OK)])
def test_thread_levels(level, kind):
    everyone = job()
    everyone[1] = replace(everyone[1], thread_level=level)
    assert checks.THREAD_LEVELS[level] in only(everyone, kind, "threads").text


def test_more_ranks_than_cores_is_a_warning():
    assert "4 ranks on 2 usable cores" in only(job(cores=(0, 1)), WARNING, "cores").text


def test_a_rank_on_one_core_is_a_warning():
    everyone = [replace(facts, cores=(facts.rank,)) for facts in job()]
    assert "bound to one core" in only(everyone, WARNING, "cores").text


def test_each_host_is_judged_by_itself():
    everyone = job()
    everyone[3] = replace(everyone[3], host="n1", cores=(0,))
    assert "n1" in only(everyone, WARNING, "cores").text
    assert "n0: 3, n1: 1" in only(everyone, OK, "hosts").text


@pytest.mark.parametrize(
    ("changes", "level", "subject"),
    [
        ({"library": "MPICH 5.0.2"}, WARNING, "MPI"),
        ({"versions": {**VERSIONS, "torch": "2.10.0"}}, FAULT, "versions"),
        ({"versions": {**VERSIONS, "numpy": "2.0.0"}}, WARNING, "versions"),
        ({"open_files": 256}, WARNING, "limits"),
        ({"memlock": 65536}, NOTE, "limits"),
        ({"shm_nbytes": 64 << 20}, WARNING, "/dev/shm"),
        ({"cma": "Operation not permitted"}, NOTE, "CMA"),
        ({"tag_limit": 1000}, FAULT, "tag limit"),
    ],
)
def test_one_strange_rank_is_found(changes, level, subject):
    everyone = job()
    everyone[1] = replace(everyone[1], **changes)
    assert found(everyone, level) == [subject]


def test_an_old_torch_is_a_fault():
    finding = only(job(versions={**VERSIONS, "torch": "2.8.1"}), FAULT, "versions")
    assert "torch>=2.9" in finding.mend


def test_cma_does_not_matter_where_a_host_has_one_rank():
    assert found(job(1, environ={}, cma="Operation not permitted"), NOTE) == ["ranks"]


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 3], "0-1, 3, 7"), ([], "")]
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(-1, "unlimited"), (0, "0"), (2048, "2 KiB"), (3 << 29, "1.5 GiB"), (64 << 20, "64 MiB")],
)
def test_size_text(nbytes, text):
    assert size_text(nbytes) == text


def test_report_ends_with_the_verdict():
    healthy, broken = job(), job(thread_level=0)
    assert (
        as_report(healthy, find_all(healthy))
        .splitlines()[-1]
        .startswith("doctor: a job started like this works")
    )
    assert "would not work" in as_report(broken, find_all(broken)).splitlines()[-1]
    assert "hint: remove mpi4py.rc" in as_report(broken, find_all(broken))


def test_json_says_whether_all_is_well():
    assert '"ok": true' in as_json(job(), find_all(job()))
    assert '"ok": false' in as_json(job(thread_level=0), find_all(job(thread_level=0)))
