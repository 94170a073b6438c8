"""The scripts of ``slurm/`` do what they say, submitted to a Slurm of two nodes as they are.

What differs from a user's job comes through the scripts' settings and options of sbatch: the environment, the
number of ranks, and programs that show what was asked for. Needs root and Slurm's programs; plain ``pytest``
does not come here: ``pytest tests/slurm``.
"""

import os
import re
import select
import subprocess
import sys
import time

import pytest
import torch

from tests._ranks.launch import ROOT, is_open_mpi
from tests.hosts.namespaces import Hosts, Unavailable, wait_until
from tests.slurm.cluster import CORES, Cluster, why_not

LIMIT = 120
MPI_TYPE = "pmix" if is_open_mpi() else "pmi2"
SETTINGS = {"VENV": sys.prefix, "MPI_TYPE": MPI_TYPE}
if not is_open_mpi():  # UCX's addresses are long: Slurm's PMI2 hands them over damaged at times
    SETTINGS |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
SCRIPTS = {
    "cores.sbatch",
    "gpus.sbatch",
    "het.sbatch",
    "interactive.sh",
    "mpirun.sbatch",
    "requeue.sbatch",
    "srun.sbatch",
}
FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
PLACEMENT = re.compile(r"rank (\d+) of (\d+): host (\w+), cores ([\d,]+), gpus ([\w,]+), threads (\d+)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm here: {reason}")
    try:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    with hosts, Cluster(tmp_path_factory.mktemp("slurm"), hosts) as up:
        yield up


def promised_line(script):
    """A pattern for the last line of output, as the comment at the script's top gives it."""
    text = (ROOT / "slurm" / script).read_text(encoding="utf-8")
    (line,) = re.findall(r'Last line of the output: "(.*)"', text)
    return ".*".join(map(re.escape, line.split("...")))


def check_last_line(job, script):
    assert job.state == "COMPLETED", job.output
    assert re.fullmatch(promised_line(script), job.last_line), job.output


def placements(job, ranks):
    """Host, cores, GPUs and threads of each rank."""
    assert job.state == "COMPLETED", job.output
    found = [match.groups() for match in PLACEMENT.finditer(job.output)]
    assert [(rank, size) for rank, size, *_ in found] == [(str(rank), str(ranks)) for rank in range(ranks)], (
        job.output
    )
    return [(host, cores.split(","), gpus.split(","), threads) for _, _, host, cores, gpus, threads in found]


def test_every_script_is_tested():
    assert {path.name for path in (ROOT / "slurm").iterdir()} == SCRIPTS


@pytest.mark.parametrize("script", ["srun.sbatch", "mpirun.sbatch"])
def test_demo(cluster, script):
    env = {**SETTINGS, "SCRIPT": "-m mpirpc demo --epochs 2"}
    job = cluster.wait(cluster.submit(script, env=env), LIMIT)
    check_last_line(job, script)
    assert "4 workers" in job.output, job.output


# --- cores and GPUs ---


@pytest.mark.parametrize(("a_node", "cores_each"), [(2, 1), (1, 2)])
def test_ranks_have_cores_of_their_own(cluster, a_node, cores_each):
    if (os.cpu_count() or 1) < CORES:
        pytest.skip(f"needs {CORES} cores")
    options = ("--nodes=2", f"--ntasks-per-node={a_node}", f"--cpus-per-task={cores_each}")
    env = {**SETTINGS, "SCRIPT": "-m tests.slurm.placement"}
    found = placements(cluster.wait(cluster.submit("cores.sbatch", *options, env=env), LIMIT), 2 * a_node)
    assert len({(host, core) for host, cores, _, _ in found for core in cores}) == 2 * a_node * cores_each, (
        found
    )
    assert all(len(cores) == cores_each and threads == "1" for _, cores, _, threads in found), found


def test_ranks_have_gpus_of_their_own(cluster):
    """The devices are pretended: this shows that Slurm gives each rank one, not that CUDA works."""
    if not cluster.has_gpus:
        pytest.skip("no device files can be made here")
    env = {**SETTINGS, "SCRIPT": "-m tests.slurm.placement"}
    found = placements(cluster.wait(cluster.submit("gpus.sbatch", *FOUR_RANKS, env=env), LIMIT), 4)
    assert [host for host, *_ in found] == ["n1", "n1", "n2", "n2"]
    assert all(len(gpus) == 1 and gpus[0].isdecimal() for _, _, gpus, _ in found), found


def test_doctor_in_a_job(cluster):
    if not cluster.has_gpus:
        pytest.skip("no device files can be made here")
    job = cluster.wait(cluster.submit("gpus.sbatch", *FOUR_RANKS, env=SETTINGS), LIMIT)
    check_last_line(job, "gpus.sbatch")
    assert f"srun --mpi={MPI_TYPE}; MPI sees 4 rank(s)" in job.output
    assert "2 host(s), ranks a host: n1: 2, n2: 2" in job.output


# --- jobs of other shapes ---


def test_two_kinds_of_nodes(cluster):
    job = cluster.wait(cluster.submit("het.sbatch", env=SETTINGS), LIMIT)
    check_last_line(job, "het.sbatch")


def test_a_stopped_job_goes_on_where_it_was(cluster, tmp_path):
    """The signal is the one that Slurm sends before the time limit, to the same processes."""
    checkpoint = tmp_path / "checkpoint.pt"
    program = str(ROOT / "tests" / "slurm" / "stopped_training.py")
    env = {**SETTINGS, "SCRIPT": program, "CHECKPOINT": str(checkpoint)}
    number = cluster.submit("requeue.sbatch", env=env)
    wait_until(lambda: "waiting for a signal" in cluster.output(number), "step 7", LIMIT)
    assert not checkpoint.exists()
    assert cluster.run("scancel", "--signal=USR1", number, timeout=30).rc == 0
    job = cluster.wait(number, LIMIT)
    check_last_line(job, "requeue.sbatch")
    assert job.last_line == "requeue: done after 1 restart(s)"
    assert "requeue: stopped, goes on later" in job.output
    assert "step 7: resumed from checkpoint.pt" in job.output
    assert len(torch.load(checkpoint, weights_only=True)["losses"]) == 20


def test_a_prompt_on_rank_0(cluster):
    with Terminal(
        cluster.command("bash", "slurm/interactive.sh"), {**cluster.environment, **SETTINGS}
    ) as prompt:
        prompt.read_until("worker0, worker1 are here")
        prompt.read_until(">>> ")
        prompt.write('rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 41))\n')
        prompt.read_until("tensor([42., 42.])")
        prompt.read_until(">>> ")
        prompt.write("\x04")
        assert re.search(promised_line("interactive.sh"), prompt.read_until("session ended"))
        assert prompt.process.wait(LIMIT) == 0


class Terminal:
    """A program that believes a person to be there; a context manager."""

    def __init__(self, command, env):
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def write(self, text):
        os.write(self._master, text.encode())

    def read_until(self, text):
        """Return what comes up to ``text`` and with it."""
        deadline = time.monotonic() + LIMIT
        while text not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0, self._seen
            assert select.select([self._master], [], [], left)[0], self._seen
            self._seen += os.read(self._master, 65536).replace(b"\0", b"").decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before + text


# --- the wrong start ---


def test_srun_without_mpi_is_told_from_a_job(cluster):
    finished = cluster.run(
        "srun", "-n", "2", "--mpi=none", sys.executable, "-m", "mpirpc", "doctor", timeout=LIMIT
    )
    assert finished.rc != 0
    lines = [line for line in finished.output.splitlines() if line.startswith("FAULT")]
    assert len(lines) == 2, finished.output
    assert all("srun without --mpi started 2 ranks" in line for line in lines)
    assert "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)" in finished.output
