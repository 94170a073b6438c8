"""What the smallest call costs, with mpirpc and with torch's own RPC, one after the other in one run.

    mpirun -n 2 python examples/latency.py

Rank 0 calls a function on rank 1 that does nothing and waits for its answer, many times. torch's RPC runs in
the same processes once mpirpc is shut down. It needs a port to meet at, which the ranks learn by a call of
mpirpc; they must be on one machine. ``python -m mpirpc bench --peer torch`` measures more, by turns.

Prints both medians and how many times faster mpirpc is, in a last line of the form
``no-op rpc_sync, median: mpirpc 30.0 us, torch 300.0 us, ratio 10.0``.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed.rpc as torch_rpc

import mpirpc as rpc

WARM = 100
"""Calls before those that count."""


def noop() -> None:
    pass


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


PORT = free_port()
"""Every process has one; the workers of torch meet at rank 0's."""


def get_port() -> int:
    return PORT


def median_latency(rpc_sync: Callable[..., Any], num_calls: int) -> float:
    """Seconds from a call of worker1 to its answer."""
    samples = []
    for _ in range(WARM + num_calls):
        start = time.perf_counter()
        rpc_sync("worker1", noop)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[WARM:])


def measure_torch(rank: int, size: int, port: int, num_calls: int) -> float:
    """Start torch's RPC, measure at rank 0, and stop it."""
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    median = median_latency(torch_rpc.rpc_sync, num_calls) if rank == 0 else 0.0
    torch_rpc.shutdown()
    return median


def main() -> int:
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's shutdown, about itself
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls that count, of each library (2000)")
    num_calls = parser.parse_args().calls

    rpc.init_rpc()
    rank, size = rpc.get_worker_info().id, len(rpc.get_worker_infos())
    if size < 2:
        rpc.shutdown()
        print("start it on two ranks: mpirun -n 2 python examples/latency.py", file=sys.stderr)
        return 2
    port = rpc.rpc_sync("worker0", get_port)
    ours = median_latency(rpc.rpc_sync, num_calls) if rank == 0 else 0.0
    rpc.shutdown()  # the other ranks wait here, and answer meanwhile

    theirs = measure_torch(rank, size, port, num_calls)
    if rank == 0:
        print(
            f"no-op rpc_sync, median: mpirpc {ours * 1e6:.1f} us, torch {theirs * 1e6:.1f} us, "
            f"ratio {theirs / ours:.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
