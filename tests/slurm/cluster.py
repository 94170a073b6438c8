"""A Slurm of two nodes on one machine, from the distribution's packages, all of it below one folder.

The nodes are the hosts of :mod:`tests.hosts.namespaces`, with their own names and addresses: MPI sees two
hosts. slurmctld runs on the first. Every daemon is a child of this process, and ends with it.

Facts that shaped the configuration (Slurm 22.05 of Debian 12):

- slurmd loads a cgroup plugin though nothing here uses cgroups, and does not start if it is left to find out
  which: ``cgroup.conf``.
- A node's name must be its hostname, or PMIx 5 does not find the node in the job's data.
- A requeued job waits until the credential of its first run has expired: ``cred_expire``.
- The PMIx plugin opens ``libpmix.so``, a name that only a package for developers has: see ``why_not``.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests._ranks.launch import ROOT, Finished, is_open_mpi, rank_environment, run_job
from tests.hosts.namespaces import Hosts, wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "munged", "mungekey")
PORT = 26917
CORES = 2
"""Of each node. On a machine with one core they are pretended, and nothing is bound."""

GPUS = 2
"""Of each node, pretended: enough for Slurm to give them out and to say so in CUDA_VISIBLE_DEVICES."""

CONFIGURATION = """\
ClusterName=mpirpc
SlurmctldHost=n1({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={port}
SlurmdPort={next_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=2,bf_interval=1
ReturnToService=2
KillWait=30
MessageTimeout=30
NodeName=n1 NodeAddr={n1} {node}
NodeName=n2 NodeAddr={n2} {node}
PartitionName=main Nodes=ALL Default=YES State=UP
"""

NODE = f"CPUs={CORES} Boards=1 SocketsPerBoard=1 CoresPerSocket={CORES} ThreadsPerCore=1 Gres=gpu:{GPUS}"


def why_not() -> str:
    """Say why there can be no Slurm here; nothing if there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge libpmix2"
    folders = list(Path("/usr/lib").glob("*-linux-gnu/pmix2/lib"))
    if is_open_mpi() and folders and not (folders[0] / "libpmix.so").exists():
        return f"Slurm's PMIx plugin misses its library: ln -s libpmix.so.2 {folders[0]}/libpmix.so"
    return ""


class Job(NamedTuple):
    """How a batch job ended."""

    state: str
    """Slurm's word, such as ``COMPLETED``."""
    output: str

    @property
    def last_line(self) -> str:
        """What the scripts promise."""
        return self.output.rstrip().splitlines()[-1] if self.output.strip() else ""


class Cluster:
    """The nodes ``n1`` and ``n2`` with ``CORES`` cores each; a context manager.

    Args:
        folder: An empty folder below which everything lives.
        hosts: The nodes.

    Attributes:
        environment: Of a user who is logged in on a node.
        has_gpus: Whether Slurm gives out GPUs, which are none.
    """

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self._folder = folder
        self._hosts = hosts
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.has_gpus = _make_devices(folder)
        self.environment = {**_user_environment(), "SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def run(self, *argv: str | Path, timeout: float, env: Mapping[str, str] | None = None) -> Finished:
        """Run a command on the first node, as a user who is logged in there."""
        command = self._hosts.command("n1", argv, ROOT)
        return run_job(command, timeout, {**self.environment, **(env or {})})

    def command(self, *argv: str | Path) -> list[str]:
        """Return the command that does so, to be started with ``environment``."""
        return self._hosts.command("n1", argv, ROOT)

    def submit(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a script of ``slurm/``; return the job's number."""
        where = f"--output={self._folder}/job-%j.out"
        done = self.run("sbatch", "--parsable", where, *options, f"slurm/{script}", timeout=30, env=env)
        assert done.rc == 0, done.output
        return done.output.strip().splitlines()[-1].split(";")[0]

    def wait(self, job: str, limit: float) -> Job:
        """Wait until a job has ended for good; it is cancelled when it has not in time."""
        try:
            wait_until(lambda: self._has_ended(job), f"end of job {job}", limit)
        except TimeoutError:
            text = self.run("scontrol", "show", "job", job, timeout=30).output
            self.run("scancel", job, timeout=30)
            raise AssertionError(
                f"job {job} did not end:\n{self.output(job)}\n{text}\n{self._logs()}"
            ) from None
        return Job(self.state(job), self.output(job))

    def state(self, job: str) -> str:
        """Slurm's word for what a job is doing."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job, timeout=30).output
        found = re.search(r"JobState=(\w+)", shown)
        assert found, shown
        return found[1]

    def output(self, job: str) -> str:
        """What a job has printed so far."""
        file = self._folder / f"job-{job}.out"
        return file.read_bytes().replace(b"\0", b"").decode(errors="replace") if file.exists() else ""

    def close(self) -> None:
        """Cancel what runs, end the daemons."""
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root", timeout=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _has_ended(self, job: str) -> bool:
        return (
            self.run("squeue", "--noheader", f"--jobs={job}", "--format=%A", timeout=30).output.strip() == ""
        )

    def _start(self) -> None:
        folder = self._folder
        folder.chmod(0o755)
        for name in ("state", *(f"{kind}-{host}" for kind in ("spool", "tmp") for host in self._hosts.names)):
            (folder / name).mkdir()
        addresses = {name: self._hosts.address(name) for name in self._hosts.names}
        bound = (os.cpu_count() or 1) >= CORES
        text = CONFIGURATION.format(
            folder=folder,
            controller=addresses["n1"],
            port=PORT,
            next_port=PORT + 1,
            node=f"Port={PORT + 1} {NODE}",
            task_plugin="task/affinity" if bound else "task/none",
            **addresses,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = f" File={folder}/gpu[0-{GPUS - 1}]" if self.has_gpus else f" Count={GPUS}"
        (folder / "gres.conf").write_text(f"Name=gpu{files}\n")
        subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
        self._daemon(
            "n1",
            [
                "munged",
                "--foreground",
                "--force",
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munge.pid",
                f"--log-file={folder}/munge.log",
                f"--seed-file={folder}/munge.seed",
            ],
        )
        wait_until((folder / "munge.socket").exists, "munged")
        self._daemon("n1", ["slurmctld", "-D", "-i"])
        for name in self._hosts.names:
            self._daemon(name, ["slurmd", "-D", "-N", name])
        try:
            wait_until(self._is_up, "nodes of Slurm", 60)
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{self._logs()}") from None

    def _daemon(self, name: str, argv: Sequence[str]) -> None:
        command = self._hosts.command(name, ["setpriv", "--pdeathsig=KILL", *argv], self._folder)
        with (self._folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
        if ended:
            raise RuntimeError(f"ended at its start: {ended}\n{self._logs()}")
        shown = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", timeout=30)
        return sorted(shown.output.split()) == self._hosts.names

    def _logs(self) -> str:
        files = [*self._folder.glob("*.log")]
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def _make_devices(folder: Path) -> bool:
    """Make what Slurm takes for GPUs: device files that swallow everything, as /dev/null does."""
    try:
        for number in range(GPUS):
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        return False
    return True


def _user_environment() -> dict[str, str]:
    """This process's environment without the Slurm job that it may be in."""
    env = {name: value for name, value in rank_environment({}).items() if not name.startswith("SLURM")}
    return {**env, "HOME": env.get("HOME", "/root"), "PYTHONPATH": str(ROOT)}
