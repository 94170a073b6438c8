"""Programs written for torch.distributed.rpc run unchanged on mpirpc, with the same figures."""

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests._ranks.launch import ROOT, rank_environment, run_ranks

PROGRAMS = ["parameter_server", "observers", "rnn", "pipeline", "batch_updating", "ddp", "names"]
LIMIT = 150
ENV = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def on_torch(path, meet):
    """Run a program as it is meant: its processes talk by TensorPipe on this machine. Gives its output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    torch_env = {
        **ENV,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TP_SOCKET_IFNAME": "lo",
        "MEET": meet,
    }
    finished = subprocess.run(
        [sys.executable, path],
        env=rank_environment(torch_env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_every_program_is_run():
    here = {path.stem for path in (ROOT / "tests" / "dropin").glob("*.py")} - {"__init__"}
    assert here == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_torch_program_gives_the_same_on_mpirpc(name, tmp_path):
    path = f"tests/dropin/{name}.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    assert "mpirpc" not in source
    ranks = int(re.findall(r"^PROCESSES = (\d)$", source, re.MULTILINE)[0])
    here = {**ENV, "MEET": str(tmp_path / "mpirpc")}
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(on_torch, path, str(tmp_path / "torch"))
        finished = run_ranks(ranks, ["-m", "mpirpc", "run", path], timeout=LIMIT, env=here)
    assert finished.rc == 0, finished.output
    expected = there.result()
    assert expected.count("\n") >= 3
    assert finished.output == expected


def test_a_wrong_number_of_ranks_names_the_right_command():
    finished = run_ranks(2, ["-m", "mpirpc", "run", "tests/dropin/pipeline.py"], timeout=LIMIT, env=ENV)
    assert finished.rc == 1, finished.output
    assert (
        "the program starts 3 processes by torch.multiprocessing.spawn, but this job has 2" in finished.output
    )
    assert "mpirun -n 3 python -m mpirpc run tests/dropin/pipeline.py" in finished.output


SHOW = """
import os, torch, torch.distributed.rpc as rpc, torch.distributed as dist
dist.init_process_group("gloo")
mine = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
total = torch.ones(1)
dist.all_reduce(total)
print(*mine, total.item(), rpc.__file__ if hasattr(rpc, "__file__") else "mpirpc", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [[], ["--keep-torch"]], ids=["drop-in", "keep-torch"])
def test_gloo_meets_by_the_environment(options, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    env = {**ENV, "RANK": "7", "WORLD_SIZE": "2"}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert name not in os.environ
    finished = run_ranks(
        2, ["-m", "mpirpc", "run", *options, str(tmp_path / "show.py")], timeout=LIMIT, env=env
    )
    assert finished.rc == 0, finished.output
    lines = sorted(finished.output.splitlines())
    assert [line.split()[:5] for line in lines] == [["0", "0", "2", "2", "2.0"], ["1", "1", "2", "2", "2.0"]]
    assert all(line.endswith("__init__.py") == bool(options) for line in lines)
