"""One MPI rank: takes test names from the driver's socket, runs each test method, reports the outcome.

``python -m tests.conformance.worker --dir DIR``; tests run in this process, one after another, so they also
prove that ``init_rpc`` and ``shutdown`` can be repeated.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from tests.conformance import names
from tests.conformance.facades import Facade
from tests.conformance.torch_suite import StateKeeper, Suite

LOST_DRIVER = 3
"""Exit status when the driver is gone."""

Outcome = dict[str, Any]


def run_test(suite: Suite, test: str, rank: int, file_name: str) -> Outcome:
    """Do what ``MultiProcessTestCase.run_test`` does in the process of one rank."""
    from torch.testing._internal.common_distributed import TEST_SKIPS  # not before the facades are in place

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    try:
        _call_method(suite, test, rank, file_name)
    except unittest.SkipTest as error:
        return {"status": "skip", "error": str(error)}
    except SystemExit as error:
        if error.code in skips:
            return {"status": "skip", "error": skips[error.code]}
        if error.code in (None, 0):
            return {"status": "pass", "exited": True}
        return {"status": "fail", "error": f"SystemExit: {error.code}"}
    except BaseException as error:
        traceback.print_exc()
        return {"status": "fail", "error": _first_line(error)}
    _destroy_process_group()
    return {"status": "pass"}


def _call_method(suite: Suite, test: str, rank: int, file_name: str) -> None:
    from torch.testing._internal.common_utils import set_rng_seed

    class_name, method = test.split(".")
    case = suite[class_name](method)
    case.rank = rank
    case.file_name = file_name
    set_rng_seed()  # type: ignore[no-untyped-call]
    getattr(case, method)()


def _destroy_process_group() -> None:
    import torch.distributed as dist

    try:
        dist.destroy_process_group()
    except (AssertionError, ValueError):
        pass  # as upstream: there may be none left


def clean_up() -> None:
    """After a failure: shut RPC down, as the other ranks wait for it, so that the job can go on."""
    try:
        names.shutdown_if_running()
        _destroy_process_group()
    except BaseException:
        traceback.print_exc()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def _commands(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """What the driver says. A thread reads, so that this process ends with the driver, even inside a test."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sock.makefile():
            waiting.put(line)
        os._exit(LOST_DRIVER)

    threading.Thread(target=read, name="driver", daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def serve(suite: Suite, rank: int, sock: socket.socket, send: Callable[..., None]) -> None:
    """Run what the driver asks for until it says exit."""
    keeper = StateKeeper()
    tests = suite.tests() if rank == 0 else []
    send(kind="hello", rank=rank, pid=os.getpid(), missing=sorted(Facade.missing), tests=tests)
    for command in _commands(sock):
        if command["kind"] == "exit":
            return
        print(f"=== rank {rank}: {command['test']}", file=sys.stderr, flush=True)
        keeper.restore()
        names.reset()
        outcome = run_test(suite, command["test"], rank, command["file"])
        send(kind="done", rank=rank, **outcome)
        if outcome["status"] == "fail":
            clean_up()
        clean = not names.is_running() and not outcome.get("exited")
        send(kind="ready", rank=rank, clean=clean)


def main() -> None:
    """Connect to the driver, import the suite, serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="the driver's folder for this job")
    folder = parser.parse_args().dir
    rank = MPI.COMM_WORLD.rank
    faulthandler.enable()
    stacks = open(os.path.join(folder, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.path.join(folder, "s"))

    def send(**message: Any) -> None:
        sock.sendall(json.dumps(message).encode() + b"\n")

    try:
        suite = Suite(names.install())
    except BaseException as error:
        traceback.print_exc()
        send(kind="hello", rank=rank, pid=os.getpid(), error=_first_line(error))
        raise
    serve(suite, rank, sock, send)
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
