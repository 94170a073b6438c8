"""The torch side of ``bench``: one worker of ``torch.distributed.rpc`` (TensorPipe) in a process of its own.

The only file that imports torch's RPC. It is started by its path and never as a part of mpirpc, which would
start MPI in these processes::

    python bench_torch_peer.py RANK SIZE PATH_OF_BENCH_WORK CPUS

Commands come on standard input, one JSON object a line; each is answered by one on standard output::

    {"do": "init", "port": 29500}                                             join the group
    {"do": "measure", "work": "echo", "parameters": {"nbytes": 1024}, "count": 10, "warm": 2}
    {"do": "shutdown"}                                                        leave it; all workers at once
    {"do": "cycle", "port": 29500}                                            both, timed
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import torch
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer

RPC_TIMEOUT = 300.0
PR_SET_PDEATHSIG = 1


class Peer:
    """What the commands do."""

    def __init__(self, rank: int, size: int, work: Any) -> None:
        self._rank = rank
        self._size = size
        self._work = work
        work.install(work.Api(rpc, autograd, DistributedOptimizer, rank, size))

    def init(self, port: int) -> None:
        """Join the group; rank 0 listens at ``port``."""
        options = rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=RPC_TIMEOUT, init_method=f"tcp://127.0.0.1:{port}"
        )
        init_rpc: Any = rpc.init_rpc  # not annotated in torch
        init_rpc(
            self._work.worker_name(self._rank),
            rank=self._rank,
            world_size=self._size,
            rpc_backend_options=options,
        )

    def shutdown(self) -> None:
        """Leave the group, together with the others."""
        rpc.shutdown()

    def cycle(self, port: int) -> float:
        """Do both; return the seconds that it took."""
        start = time.perf_counter()
        self.init(port)
        self.shutdown()
        return time.perf_counter() - start

    def measure(self, **request: Any) -> Any:
        """Run ``bench_work.measure``."""
        return self._work.measure(**request)


def main(rank: str, size: str, work_path: str, cpus: str) -> None:
    """Answer commands until standard input ends."""
    # The parent stops this process while it measures itself; a stopped process sees no end of input.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    peer = Peer(int(rank), int(size), _load(work_path))
    _answer(answers, {"value": torch.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(peer, request.pop("do"))(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        _answer(answers, answer)
    os._exit(0)  # nothing is left to save, and TensorPipe waits for its peers otherwise


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _load(path: str) -> Any:
    """Import a file under a name of its own, by which its functions are pickled."""
    spec = importlib.util.spec_from_file_location("bench_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_work"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
