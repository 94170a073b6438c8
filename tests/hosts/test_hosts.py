"""Ranks on two hosts: the core of the MPI suite and the demo, with every message over TCP.

Once over a plain cable, once with a delay of 1 ms in each direction, which shuffles what arrives when. Needs
root and Linux namespaces; plain ``pytest`` does not come here: ``pytest tests/hosts``.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping

import pytest

from tests._ranks import results
from tests._ranks.launch import ROOT, is_open_mpi, mpirun, rank_environment, run_job
from tests.hosts.namespaces import Hosts, Unavailable

LIMIT = 300
DELAY = 1.0
SELECTION = [
    "tests/mpi/test_smoke.py",
    "tests/mpi/test_rref_mpi.py",
    "tests/mpi/test_autograd.py",
    "tests/mpi/test_data.py",
]

OPEN_MPI = "--bind-to none --mca btl_tcp_if_include eth0 --prtemca plm_ssh_agent"
MPICH = "-iface eth0 -launcher ssh -launcher-exec"
HANDED_ON = ("HOME", "MPIRPC_", "OMP_", "OMPI_", "PYTHON")
"""What Open MPI has to be told to hand on to ranks on other hosts; MPICH hands on everything."""


@pytest.fixture(scope="module", params=[0.0, DELAY], ids=["cable", "1 ms"])
def hosts(request, tmp_path_factory):
    try:
        with Hosts(tmp_path_factory.mktemp("hosts"), request.param) as up:
            yield up
    except Unavailable as error:
        pytest.skip(f"no hosts here: {error}")


def launcher(hosts: Hosts, ranks_each: int, env: Mapping[str, str]) -> list[str]:
    """The beginning of a command for that many ranks on each host."""
    n = len(hosts.names) * ranks_each
    if is_open_mpi():
        names = [name for name in env if name.startswith(HANDED_ON)]
        places = ",".join(f"{name}:{ranks_each}" for name in hosts.names)
        handed_on = [word for name in names for word in ("-x", name)]
        return [mpirun(), "--host", places, *OPEN_MPI.split(), str(hosts.agent), *handed_on, "-n", str(n)]
    places = ["-hosts", ",".join(hosts.names), "-ppn", str(ranks_each)]
    return [mpirun(), *places, *MPICH.split(), str(hosts.agent), "-n", str(n)]


def run_on(hosts, ranks_each, argv, **changes):
    """Run ``python *argv`` on both hosts; return how it ended, and how many bytes left the first host."""
    env = {**rank_environment(changes), "PYTHONPATH": str(ROOT)}
    command = hosts.command("n1", [*launcher(hosts, ranks_each, env), sys.executable, *argv], ROOT)
    before = hosts.sent_bytes("n1")
    finished = run_job(command, LIMIT, env)
    return finished, hosts.sent_bytes("n1") - before


def test_delay_is_what_was_asked_for(hosts):
    """A connection that is refused takes one packet there and one back."""
    program = """if True:
        import socket, time
        start = time.perf_counter()
        refused = socket.socket().connect_ex(("n2", 1))
        print(refused, time.perf_counter() - start)"""
    finished = run_job(
        hosts.command("n1", [sys.executable, "-c", program], ROOT), LIMIT, rank_environment({})
    )
    refused, seconds = finished.output.split()
    assert int(refused) == errno.ECONNREFUSED
    assert float(seconds) >= 2e-3 * hosts.delay


def test_suite(hosts, tmp_path, subtests):
    file = tmp_path / "results.jsonl"
    argv = ["-m", "pytest", *"-q --color=no --capture=sys -p no:cacheprovider --with-mpi".split(), *SELECTION]
    finished, sent = run_on(hosts, 1, argv, **{results.VARIABLE: str(file)})
    found = results.read(file)
    for result in found.tests:
        with subtests.test(msg=result.nodeid):
            if result.outcome == "failed":
                pytest.fail(result.text, pytrace=False)
            if result.outcome == "skipped":
                pytest.skip(result.text)
    assert found.finished == 0, f"status {finished.rc}: {finished.output[-10_000:]}"
    assert {result.nodeid.split("::")[0] for result in found.tests} == set(SELECTION)
    assert sent > 1 << 20


def test_large_tensor_crosses_the_network(hosts):
    program = """if True:
        import torch, mpirpc as rpc
        from mpi4py import MPI
        rpc.init_rpc()
        if rpc.get_worker_info().id == 0:
            there = torch.arange(1 << 23, dtype=torch.float32)
            back = rpc.rpc_sync("worker1", torch.neg, args=(there,))
            host = rpc.rpc_sync("worker1", MPI.Get_processor_name)
            print("same" if torch.equal(back, -there) else "different", host, flush=True)
        rpc.shutdown()"""
    finished, sent = run_on(hosts, 1, ["-c", program])
    assert (finished.rc, finished.output.splitlines()[-1:]) == (0, ["same n2"]), finished.output
    assert sent >= 4 << 23, f"{sent} bytes crossed the network: there is another way between the hosts"


def test_demo(hosts):
    finished, sent = run_on(hosts, 2, ["-m", "mpirpc", "demo", "--check", "--epochs", "3"])
    assert finished.rc == 0, finished.output
    assert "RPCs made" in finished.output
    assert sent > 1 << 20
