"""``python -m mpirpc bench`` between two hosts of namespaces, with TensorPipe's workers on the same two.

    python -m tests.hosts.bench_two_hosts [--delay MILLISECONDS] [options of bench]

``bench`` by itself keeps TensorPipe's workers on rank 0's node. This starts the second of them on the other
host, tells both to meet at the first host's address, and leaves TensorPipe only its TCP transport: the two
"hosts" are one machine, so its faster ways between processes would find each other. Interface ``eth0`` counts
what was sent; the last line shows it.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests._ranks.launch import ROOT, rank_environment
from tests.hosts.namespaces import Hosts
from tests.hosts.test_hosts import launcher

HERE = "tests.hosts.bench_two_hosts"
LISTENER = "n1"


def run_bench(enter: str, arguments: Sequence[str]) -> int:
    """Run bench on this rank; peers other than rank 0's start on the second host by the command ``enter``."""
    from mpirpc.__main__ import main
    from mpirpc.cli import bench_peers

    bench_peers._start_peer = functools.partial(start_peer, shlex.split(enter))
    return main(["bench", *arguments])


def start_peer(
    enter: Sequence[str], rank: int, size: int, cpus: Sequence[int], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a worker of TensorPipe, on the host that it belongs to."""
    from mpirpc.cli import bench_peers

    folder = ROOT / "mpirpc" / "cli"
    words = [str(rank), str(size), str(folder / "bench_work.py"), ",".join(map(str, cpus))]
    program = [sys.executable, "-m", HERE, "--as-peer", str(folder / "bench_torch_peer.py"), *words]
    environment = bench_peers.peer_environment(os.environ)
    return subprocess.Popen(
        [*(enter if rank else []), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "TP_SOCKET_IFNAME": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
        },
    )


def be_peer(path: str, words: Sequence[str]) -> None:
    """Run bench's program for TensorPipe, with the first host in the place of this one, and TCP alone."""
    from torch.distributed import rpc

    class OverTcp(rpc.TensorPipeRpcBackendOptions):
        def __init__(self, **given: Any) -> None:
            there = given["init_method"].replace("127.0.0.1", LISTENER)
            ways = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
            super().__init__(**{**given, **ways, "init_method": there})

    rpc.TensorPipeRpcBackendOptions = OverTcp  # type: ignore[misc]
    sys.argv[:] = [path, *words]
    runpy.run_path(path, run_name="__main__")


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--as-peer"]:
        be_peer(argv[1], argv[2:])
        return 0
    if argv[:1] == ["--as-rank"]:
        return run_bench(argv[1], argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.0, metavar="MILLISECONDS")
    arguments, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), arguments.delay) as hosts:
        env = {**rank_environment({}), "PYTHONPATH": str(ROOT)}
        rank = [sys.executable, "-m", HERE, "--as-rank", shlex.join(hosts.enter("n2"))]
        status = subprocess.run(
            hosts.command("n1", [*launcher(hosts, 1, env), *rank, *options], ROOT), env=env, check=False
        ).returncode
        print(f"{hosts.sent_bytes('n1') >> 20} MiB left {hosts.names[0]} by eth0")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
