"""One mpirun of several ranks that run the suite's tests one after another.

The driver talks to the ranks over a Unix socket, not over MPI. A test's outcome is ``pass`` (every rank
passed), ``skip``, ``fail`` (the first rank that failed, and its error's first line), ``crash`` (a process
died) or ``hang`` (not finished in time; where the ranks are stuck is recorded, and the stacks of all threads
go to the log).
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests._ranks.launch import ROOT, mpirun_command, rank_environment

BAD = ("fail", "hang", "crash")

STARTUP_LIMIT = 240.0
"""Seconds that the ranks may take to import torch and the suite."""

EXIT_LIMIT = 15.0
"""Seconds that the ranks may take to exit by themselves."""

SETTLE_LIMIT = 10.0
"""Seconds after a test until all ranks must be ready for another one in the same job."""

GRACE = 5.0
"""Seconds that the other ranks get when one has failed."""

SETTINGS = {"MKL_NUM_THREADS": "1", "TORCH_DIST_INIT_BARRIER": "1"}
"""Environment of the ranks. Some tests call others that use the process group as soon as their own
``init_process_group`` has returned; without torch's barrier the others may not have theirs yet."""

LEAVES_THREADS = {"DistAutogradTest.test_backward_unused_send_function"}
"""Tests that leave a thread stuck for ever, by design: the job is not used further."""


class JobFailed(Exception):
    """The ranks did not come up."""


@dataclass
class Outcome:
    """How one test went, all ranks together."""

    status: str
    error: str = ""
    seconds: float = 0.0
    alone: bool = False
    """It was the first test of its job."""

    @property
    def is_bad(self) -> bool:
        """Whether it failed, hung or crashed."""
        return self.status in BAD


def clean(text: str) -> str:
    """Return ``text`` without paths of this machine."""
    for path, name in (
        (str(ROOT), "<checkout>"),
        (sys.prefix, "<prefix>"),
        (tempfile.gettempdir(), "<tmp>"),
        (os.path.expanduser("~"), "~"),
    ):
        if len(path) > 3:
            text = text.replace(path, name)
    return text


class Job:
    """One mpirun of ``size`` ranks; ``log`` gets what they print.

    Attributes:
        size: Number of ranks.
        used: Tests run so far.
        reusable: Whether another test can be run in it.
        tests: Every test of the installed suite.
        missing: Private names that the suite imports and nobody provides.
    """

    def __init__(self, size: int, log: Path) -> None:
        self.size, self.used, self.reusable = size, 0, True
        self.tests: list[str] = []
        self.missing: list[str] = []
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="conf"))
        self._buffers: dict[socket.socket, bytes] = {}
        self._rank_of: dict[socket.socket, int] = {}
        self._pids: dict[int, int] = {}
        self._replies: dict[int, dict[str, Any]] = {}  # by rank, for the test now running
        self._ready: dict[int, bool] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "s"))
            listener.listen(size)
            self._process = self._start()
            try:
                self._gather(listener)
            except BaseException:
                self.kill()
                raise

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*mpirun_command(self.size), sys.executable, "-m", "tests.conformance.worker"]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, "--dir", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=rank_environment(SETTINGS | {"PYTHONPATH": str(ROOT)}),
                cwd=ROOT,
                start_new_session=True,
            )

    # --- talking to the ranks ---

    def _gather(self, listener: socket.socket) -> None:
        """Wait until every rank has said hello."""
        deadline = time.monotonic() + STARTUP_LIMIT
        while len(self._pids) < self.size:
            ready, _, _ = select.select([listener, *self._buffers], [], [], 1.0)
            if listener in ready:
                self._buffers[listener.accept()[0]] = b""
                ready.remove(listener)
            for sock in ready:
                self._greet(sock)
            if self._process.poll() is not None:
                raise JobFailed(f"mpirun ended with code {self._process.returncode}, see {self._log}")
            if time.monotonic() > deadline:
                raise JobFailed("the ranks did not start in time")

    def _greet(self, sock: socket.socket) -> None:
        for message in self._read(sock):
            if message is None or "error" in message:
                raise JobFailed((message or {}).get("error", "a rank died"))
            self._rank_of[sock] = message["rank"]
            self._pids[message["rank"]] = message["pid"]
            self.tests = self.tests or message["tests"]
            self.missing = message["missing"]

    def _read(self, sock: socket.socket) -> list[dict[str, Any] | None]:
        """Return the messages that arrived; None when the rank is gone."""
        try:
            data = sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            return [None]
        *lines, self._buffers[sock] = (self._buffers[sock] + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, **message: Any) -> None:
        for sock in self._buffers:
            sock.sendall(json.dumps(message).encode() + b"\n")

    def _pump(self) -> None:
        """Take in what the ranks say: done with an outcome, ready, or gone."""
        ready, _, _ = select.select(list(self._rank_of), [], [], 0.5)
        for sock in ready:
            for message in self._read(sock):
                rank = self._rank_of[sock]
                if message is None:
                    self._replies[rank] = {"status": "crash", "error": "the process died"}
                    del self._rank_of[sock]
                elif message["kind"] == "done":
                    self._replies[rank] = message
                else:
                    self._ready[rank] = message["clean"]

    # --- one test ---

    def run(self, test: str, limit: float) -> Outcome:
        """Run one test in all ranks, at most ``limit`` seconds."""
        self.used += 1
        self._replies, self._ready = {}, {}
        started = time.monotonic()
        self._send(kind="run", test=test, file=str(self._folder / f"store{self.used}"))
        first_bad = self._wait_for_replies(started + limit)
        waiting = sorted(set(range(self.size)) - set(self._replies))
        outcome = self._judge(first_bad, waiting)
        outcome.seconds = round(time.monotonic() - started, 1)
        outcome.alone = self.used == 1
        self.reusable = not waiting and self._settle() and test not in LEAVES_THREADS
        return outcome

    def _wait_for_replies(self, deadline: float) -> dict[str, Any] | None:
        """Wait for all ranks; return the first bad reply."""
        first_bad = None
        while len(self._replies) < self.size and time.monotonic() < deadline:
            self._pump()
            bad = [reply for reply in self._replies.values() if reply["status"] in BAD]
            if bad and first_bad is None:
                first_bad = bad[0]
                deadline = min(deadline, time.monotonic() + GRACE)
        return first_bad

    def _judge(self, first_bad: dict[str, Any] | None, waiting: list[int]) -> Outcome:
        if first_bad is not None:
            return Outcome(first_bad["status"], clean(first_bad.get("error", "")))
        if waiting:
            return Outcome("hang", self._where(waiting))
        skipped = [reply for reply in self._replies.values() if reply["status"] == "skip"]
        return Outcome("skip", clean(skipped[0]["error"])) if skipped else Outcome("pass")

    def _settle(self) -> bool:
        """Say whether all ranks are ready for another test in this job."""
        deadline = time.monotonic() + SETTLE_LIMIT
        while len(self._ready) < self.size == len(self._rank_of) and time.monotonic() < deadline:
            self._pump()
        return len(self._ready) == self.size and all(self._ready.values())

    def _where(self, ranks: list[int]) -> str:
        """Say where the main thread of each hanging rank is, in the suite's code."""
        files = {rank: self._folder / f"stack{rank}" for rank in ranks}
        starts = {rank: file.stat().st_size for rank, file in files.items()}
        for rank in ranks:
            _signal(self._pids[rank], signal.SIGUSR1)
        time.sleep(1.5)
        places = []
        for rank, file in files.items():
            dump = file.read_bytes()[starts[rank] :].decode(errors="replace")
            with self._log.open("a") as log:
                log.write(f"\n=== stacks of hanging rank {rank}\n{dump}")
            places += [f"r{rank} {place}" for place in _place_in_suite(dump)]
        return "; ".join(places)

    # --- the end ---

    def close(self) -> bool:
        """Let the ranks exit by themselves; say whether they did."""
        try:
            self._send(kind="exit")
            self._process.wait(EXIT_LIMIT)
            by_themselves = True
        except (OSError, subprocess.TimeoutExpired):
            by_themselves = False
        self.kill()
        return by_themselves

    def kill(self) -> None:
        """End what is left of the job."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in [*self._pids.values(), self._process.pid]:
                if self._process.poll() is None:
                    _signal(pid, number)
            try:
                self._process.wait(5)
                break
            except subprocess.TimeoutExpired:
                continue
        for sock in self._buffers:
            sock.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended


def _place_in_suite(dump: str) -> list[str]:
    """Return the innermost line of the suite in the stack of the thread that runs a test."""
    threads = [thread for thread in dump.split("\n\n") if "in run_test" in thread]
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', "".join(threads))
    in_suite = [frame for frame in frames if "/testing/_internal/dist" in frame[0]] or frames
    return [f"{os.path.basename(path)}:{line} {function}" for path, line, function in in_suite[:1]]
