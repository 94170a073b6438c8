"""The sides that ``bench`` compares: mpirpc itself, and torch's RPC in processes of its own.

A side measures when it is told to and is quiet otherwise. TensorPipe's threads look for work all the time, so
the processes of that side are stopped (SIGSTOP) while another side is measured; an idle mpirpc worker is
quiet by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.cli import bench_work
from mpirpc.cli.bench_work import Api, Series
from mpirpc.optim import DistributedOptimizer

ANSWER_LIMIT = 300.0
"""Seconds after which a peer that does not answer is given up, on top of what it was told to wait."""

LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "MPIR_", "MPICH_")
"""Prefixes of what MPI launchers tell their ranks; the peers are none."""


class PeerError(RuntimeError):
    """A peer could not do what it was told; the text holds its traceback or its last words."""


class Side(Protocol):
    """One of the things compared."""

    name: str

    def can(self, work: str) -> bool:
        """Say whether this side has the measurement at all."""

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this side may work; outside it is quiet."""

    def measure(self, work: str, parameters: Mapping[str, Any], count: int, warm: int) -> Series:
        """Run ``bench_work.measure``, or what corresponds to it."""


def install_mpirpc(rank: int, size: int) -> None:
    """Make the measurements use mpirpc in this process; on every rank."""
    bench_work.install(Api(rpc, autograd, DistributedOptimizer, rank, size))


class Ours:
    """mpirpc, driven by this process, rank 0."""

    name = "mpirpc"

    def can(self, work: str) -> bool:
        """All of them."""
        return True

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def measure(self, work: str, parameters: Mapping[str, Any], count: int, warm: int) -> Series:
        """Run it here."""
        return bench_work.measure(work, parameters, count, warm)


class TorchPeers:
    """A group of ``torch.distributed.rpc`` on TensorPipe: one process for each of our ranks, on this node.

    Args:
        cpus: For each rank, the cores that it may use.

    Raises:
        PeerError: A process did not start.
    """

    name = "torch"

    def __init__(self, cpus: Sequence[Sequence[int]]) -> None:
        self._log = tempfile.TemporaryFile()
        self._processes = [_start_peer(rank, len(cpus), own, self._log) for rank, own in enumerate(cpus)]
        try:
            self._collect()
            self._tell_all({"do": "init", "port": _free_port()})
        except BaseException:
            self.close()
            raise
        self._stop()

    def can(self, work: str) -> bool:
        """All of them."""
        return True

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes go on; stop them again at the end."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._stop()

    def measure(self, work: str, parameters: Mapping[str, Any], count: int, warm: int) -> Series:
        """Have rank 0 of the peers run it."""
        request = {"do": "measure", "work": work, "parameters": parameters, "count": count, "warm": warm}
        self._tell(0, request)
        waits: float = parameters.get("seconds", 0) * (count + warm)
        series: Series = self._answer(0, waits)
        return series

    def leave(self) -> None:
        """Shut the group down, so that cycles can be timed."""
        self._tell_all({"do": "shutdown"})

    def cycle(self) -> float:
        """Time ``init_rpc`` and ``shutdown``, all together; seconds at rank 0."""
        seconds: float = self._tell_all({"do": "cycle", "port": _free_port()})[0]
        return seconds

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._log.close()

    def _stop(self) -> None:
        """Return once all stand still, or have ended."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            if process.poll() is None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _tell_all(self, request: Mapping[str, Any]) -> list[Any]:
        for rank in range(len(self._processes)):
            self._tell(rank, request)
        return self._collect()

    def _collect(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self._processes))]

    def _tell(self, rank: int, request: Mapping[str, Any]) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise PeerError(f"torch peer {rank} has ended: {self._last_words()}") from error

    def _answer(self, rank: int, waits: float = 0.0) -> Any:
        """Read one line: peers answer each command once, so no line is left in a buffer."""
        pipe = self._processes[rank].stdout
        assert pipe is not None
        if not select.select([pipe], [], [], ANSWER_LIMIT + waits)[0]:
            raise PeerError(f"torch peer {rank} gave no answer in time: {self._last_words()}")
        line = pipe.readline()
        if not line:
            raise PeerError(f"torch peer {rank} has ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")


def _start_peer(rank: int, size: int, cpus: Sequence[int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    here = Path(__file__)
    program = [str(here.with_name("bench_torch_peer.py")), str(rank), str(size)]
    return subprocess.Popen(
        [sys.executable, *program, str(here.with_name("bench_work.py")), ",".join(map(str, cpus))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=peer_environment(os.environ),
    )


def peer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that no launcher started.

    Python then does not look for modules beside the program either, where ours would hide others.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return {**kept, "PYTHONSAFEPATH": "1"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
