"""The same programs on torch.distributed.rpc and on mpirpc: the same results.

mpirpc's two workers are the ranks of this run; torch's are processes of their own, without MPI, that rank 0
starts.
"""

import socket
import subprocess
import sys

import pytest
import torch
from mpi4py import MPI

import mpirpc
from tests._ranks.launch import ROOT, rank_environment
from tests.parity import programs

LIMIT = 100.0

programs.use(mpirpc, mpirpc.autograd, mpirpc.optim.DistributedOptimizer)


@pytest.fixture(scope="module")
def torch_results(tmp_path_factory):
    """What the programs give on torch; None on ranks other than 0."""
    if MPI.COMM_WORLD.size != 2:
        pytest.skip("the programs are for two workers")
    if MPI.COMM_WORLD.rank != 0:
        return None
    file = tmp_path_factory.mktemp("torch") / "results"
    workers = [_start_on_torch(rank, file, port) for port in [_free_port()] for rank in range(2)]
    try:
        outputs = [worker.communicate(timeout=LIMIT)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return torch.load(file)


def _start_on_torch(rank, file, port):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.parity.on_torch", str(rank), str(file)],
        cwd=ROOT,
        env=rank_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(120)
@pytest.mark.parametrize("name", [program.__name__ for program in programs.PROGRAMS])
def test_results_are_those_of_torch(torch_results, rpc_world, name):
    if rpc_world.rank == 0:
        compare(getattr(programs, name)(), torch_results[name])


def compare(ours, theirs):
    """Tensors are close, all else is equal."""
    assert type(ours) is type(theirs)
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            compare(one, other)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs)
    else:
        assert ours == theirs
