"""Several hosts on one machine: Linux namespaces with their own network, hostname and shared memory.

Each host has one interface, ``eth0``, that leads to the other, so messages between hosts cross TCP and
nothing else: ``/dev/shm`` and System V IPC are a host's own. Files are the machine's, as on a cluster with a
shared file system. Nothing is changed outside of the namespaces, and nothing is left once
:meth:`Hosts.close` was called: its processes are found by the namespace that they are in.

A host is held by one process that reads from a pipe until this process, which holds the other end, closes it
or ends. Needs root and the commands of util-linux and iproute2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NETWORK = "10.87.0"
"""Addresses that exist inside the namespaces only."""

START_LIMIT = 20.0
"""Seconds that a host may take to start, and its processes to end."""

HOLD = """\
set -e
mount --make-rprivate /
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo ready
exec cat
"""
"""What makes a host of new namespaces: a view of its own network in /sys, names, no shared memory."""

AGENT = """\
#!/bin/sh
# Stands in for ssh: [options] HOST COMMAND... As with ssh, the command does not get the caller's environment.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec env -i PATH="$PATH" HOME="$HOME" nsenter -t "$(cat {folder}/"$host".pid)" -m -n -u -i -- sh -c "$*"
"""


class Unavailable(RuntimeError):
    """Hosts, or a delay between them, cannot be made here; the text says why."""


def wait_until(condition: Callable[[], bool], what: str, limit: float = START_LIMIT) -> None:
    """Look again and again whether something has happened that nobody tells us.

    Raises:
        TimeoutError: It has not within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit:g} s")
        time.sleep(0.05)


class Hosts:
    """Two hosts, ``n1`` and ``n2``, joined by a cable; a context manager.

    Args:
        folder: An empty folder for what the hosts need.
        delay: Milliseconds that a packet takes from one host to the other.

    Attributes:
        names: Of the hosts.
        delay: As given.
        agent: A program that takes the place of ``ssh`` for MPI's launchers.

    Raises:
        Unavailable: They cannot be made here.
    """

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        if os.geteuid() != 0:
            raise Unavailable("making hosts of namespaces needs root")
        missing = [
            name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if not shutil.which(name)
        ]
        if missing:
            raise Unavailable(f"making hosts of namespaces needs {', '.join(missing)}")
        self.names = ["n1", "n2"]
        self.delay = delay
        self.agent = folder / "ssh"
        self._folder = folder
        self._holders: list[subprocess.Popen[bytes]] = []
        self._link: subprocess.Popen[bytes] | None = None
        try:
            self._start(delay)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def command(self, name: str, argv: Sequence[str | Path], cwd: Path) -> list[str]:
        """Return the command that runs ``argv`` on a host, with the environment of who starts it."""
        return [
            *self.enter(name),
            "sh",
            "-c",
            f"cd {shlex.quote(str(cwd))} && exec {shlex.join(map(str, argv))}",
        ]

    def enter(self, name: str) -> list[str]:
        """Return the words that, before a command, run it on a host; its working folder is ``/``."""
        return ["nsenter", "-t", str(self._pid(name)), "-m", "-n", "-u", "-i", "--"]

    def address(self, name: str) -> str:
        """The host's address at ``eth0``."""
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def sent_bytes(self, name: str) -> int:
        """How many bytes have left a host so far."""
        lines = Path(f"/proc/{self._pid(name)}/net/dev").read_text().splitlines()
        (counts,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
        return int(counts[8])

    def close(self) -> None:
        """End every process on the hosts, and so the hosts."""
        namespaces = {_network_of(holder.pid) for holder in self._holders} - {"", _network_of(os.getpid())}
        holders = {holder.pid for holder in self._holders}

        def are_empty() -> bool:
            others = _processes_in(namespaces) - holders
            for pid in others:
                _kill(pid)
            return not others

        wait_until(are_empty, "end of the processes on the hosts")
        for holder in [*self._holders, *([self._link] if self._link else [])]:
            holder.communicate()  # closes its standard input, at which it ends
        self._holders.clear()

    def _start(self, delay: float) -> None:
        known = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        self.agent.write_text(AGENT.format(folder=shlex.quote(str(self._folder))))
        self.agent.chmod(0o755)
        for name in self.names:
            self._holders.append(self._hold(name))
            (self._folder / f"{name}.pid").write_text(str(self._holders[-1].pid))
        if delay and self._has_no_netem():
            self._join_by_process(delay)
        else:
            first, second = (str(holder.pid) for holder in self._holders)
            _ip(
                "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second
            )
        for name in self.names:
            self._inside(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._inside(name, "ip", "link", "set", "eth0", "up")
        for name in self.names:
            wait_until(lambda name=name: self._is_up(name), f"eth0 of {name} is up")
        if delay and self._link is None:
            for name in self.names:
                self._inside(
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "netem",
                    "delay",
                    f"{delay}ms",
                    "limit",
                    "100000",
                )

    def _hold(self, name: str) -> subprocess.Popen[bytes]:
        holder = subprocess.Popen(
            [*"unshare --mount --net --uts --ipc -- sh -c".split(), HOLD, "sh", self._folder / "hosts", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert holder.stdout is not None
        said = holder.stdout.readline()
        if said != b"ready\n":
            said += holder.communicate()[0]
            raise Unavailable(f"namespaces cannot be made here: {said.decode().strip()}")
        return holder

    def _has_no_netem(self) -> bool:
        """Try it on the loopback of a host, where it does no harm."""
        try:
            self._inside("n1", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
            self._inside("n1", "tc", "qdisc", "del", "dev", "lo", "root")
        except (Unavailable, FileNotFoundError):
            return True
        return False

    def _join_by_process(self, delay: float) -> None:
        program = Path(__file__).with_name("delayed_link.py")
        pids = [str(holder.pid) for holder in self._holders]
        self._link = subprocess.Popen(
            [sys.executable, str(program), str(delay), *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._link.stdout is not None
        said = self._link.stdout.readline()
        if said != b"ready\n":
            said += self._link.communicate()[0]
            self._link = None
            raise Unavailable(f"no delay can be made: the kernel has no netem, and {said.decode().strip()}")

    def _is_up(self, name: str) -> bool:
        """Whether the kernel counts ``eth0`` as running, up to a second after both of its ends were set up.

        MPICH's UCX leaves out an interface that is not: the first job then fails in ``MPI_Init``. A delayed
        link's ends are of a kind whose state the kernel does not know; they run at once.
        """
        state = Path(f"/proc/{self._pid(name)}/root/sys/class/net/eth0/operstate").read_text()
        return state in ("up\n", "unknown\n")

    def _inside(self, name: str, *argv: str) -> None:
        _run(self.command(name, argv, Path("/")))

    def _pid(self, name: str) -> int:
        return self._holders[self.names.index(name)].pid


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{shlex.join(argv)}: {done.stderr.strip()}")


def _network_of(pid: int) -> str:
    """Name of the network namespace that a process is in; nothing if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _processes_in(namespaces: set[str]) -> set[int]:
    pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    return {pid for pid in pids if _network_of(pid) in namespaces}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended
