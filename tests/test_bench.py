"""``python -m mpirpc bench``: the rows are there and hold what they should. No time is asserted."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from mpirpc.__main__ import make_parser
from mpirpc.cli import bench_run
from mpirpc.cli.bench_peers import TorchPeers, peer_environment
from mpirpc.cli.bench_report import as_table, value_text
from mpirpc.cli.bench_rows import (
    MIB,
    OURS,
    RAW,
    TORCH,
    Result,
    Row,
    Scope,
    Summary,
    all_rows,
    at_most,
    rate_of_row,
    short_tail,
    sizes,
    times_faster,
)
from mpirpc.cli.bench_work import WORK
from tests._ranks.launch import ROOT, run_ranks

BENCH = ["-m", "mpirpc", "bench", "--quick"]

SPECIFIED = [
    "no-op",
    "torch.add",
    "echo 1 KiB",
    "echo 256 MiB",
    "one-way 1 KiB",
    "one-way 256 MiB",
    "1 thread",
    "4 threads",
    "16 threads",
    "64 threads",
    "1000 async",
    "remote + to_here",
    "chain of 8 hops",
    "autograd step",
    "optimizer step",
    "all-to-all",
    "no-op, caller busy",
    "no-op, callee busy",
    "first call after idle",
    "CPU while idle",
    "init + shutdown",
]
"""Rows that the benchmark must have, whatever else it has."""


def run_bench(ranks, *options, env=None):
    return run_ranks(ranks, [*BENCH, *options], timeout=180, env=env)


def result_of(summary_of_side, **counts):
    sides = {side: Summary.of(samples) for side, samples in summary_of_side.items()}
    return Result(sides=sides, **counts)


# --- on ranks ---


def test_rows_without_peers_are_in_table_and_json(tmp_path):
    path = tmp_path / "result.json"
    finished = run_bench(2, "--rows", "^no-op$|remote|echo 1 KiB|hops", "--json", str(path))
    assert finished.rc == 0, finished.output
    names = ["no-op", "echo 1 KiB", "remote + to_here", "chain of 8 hops"]
    for name in names:
        assert re.search(rf"^{re.escape(name)} +[\d.,]+ (us|ms|s|/s)", finished.output, re.MULTILINE)
    found = json.loads(path.read_text())
    assert [row["row"] for row in found["rows"]] == names
    assert found["about"]["ranks"] == 2
    assert found["about"]["command"].startswith("mpirun -n 2 python -m mpirpc bench --quick --rows")
    assert {"cpu", "cores", "mpi", "thread_level", "torch", "date"} <= set(found["about"])
    no_op = found["rows"][0]
    assert no_op["messages_per_operation"] == 2
    assert no_op["bytes_per_operation"] > 0
    assert no_op["sides"][OURS]["median"] > 0
    assert [target["target"] for target in no_op["targets"]][:2] == [">= 10x torch", "p99 <= 4x p50"]
    assert no_op["targets"][0]["met"] is None  # no peer, no judgement


def test_peers_are_measured_beside(tmp_path):
    path = tmp_path / "result.json"
    peers = [option for name in ("torch", "mpi4py", "futures") for option in ("--peer", name)]
    finished = run_bench(2, *peers, "--rows", "^no-op$|echo 1 KiB|autograd|init", "--json", str(path))
    assert finished.rc == 0, finished.output
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows["no-op"]["sides"]) == {"mpirpc", "torch", "mpi4py", "futures"}
    assert set(rows["echo 1 KiB"]["sides"]) == {"mpirpc", "torch", "mpi4py", "fresh"}
    assert set(rows["autograd step"]["sides"]) == {"mpirpc", "torch"}
    assert set(rows["init + shutdown"]["sides"]) == {"mpirpc", "torch"}
    assert rows["no-op"]["targets"][0]["met"] in (True, False)


def test_three_ranks_work():
    finished = run_bench(3, "--rows", "all-to-all|hops|memory of|CPU")
    assert finished.rc == 0, finished.output
    assert "memory of the largest rank" in finished.output


def test_one_rank_is_told_how_to_start():
    finished = run_bench(1)
    assert finished.rc == 2
    assert "mpirun -n 2 python -m mpirpc bench" in finished.output
    assert "Traceback" not in finished.output


SEVERAL_TIMES = """
import sys
from mpirpc.__main__ import main
for options in {}:
    print("status", main(["bench", "--quick", *options]), flush=True)
"""


def test_what_cannot_be_done_is_refused_before_the_work(tmp_path):
    """Unknown rows are answered with the list, a missing matplotlib or an unwritable file with a sentence."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden by the test')\n")
    refused = [
        ["--rows", "nothing like this"],
        ["--plot", "x.png"],
        ["--rows", "no-op|init", "--json", str(tmp_path / "missing" / "x.json")],
    ]
    argv = ["-c", SEVERAL_TIMES.format(refused)]
    finished = run_ranks(2, argv, timeout=180, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert finished.rc == 0, finished.output
    # Rank 0 writes the files, and hears alone that one of them cannot be.
    assert finished.output.count("status 2") == 2 * len(refused) - 1, finished.output
    for said in ("remote + to_here", "pip install mpirpc[bench]", "cannot write"):
        assert said in finished.output
    assert "Traceback" not in finished.output


# --- the torch peer ---


@pytest.fixture
def torch_peers():
    cores = sorted(os.sched_getaffinity(0))
    peers = TorchPeers([cores, cores])
    yield peers
    peers.close()


def state(process):
    """The letter of a process's state: T is stopped."""
    with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_torch_peers_stand_still_unless_they_are_measured(torch_peers):
    def states():
        return {state(process) for process in torch_peers._processes}

    assert states() == {"T"}
    with torch_peers.awake():
        assert "T" not in states()
        assert len(torch_peers.measure("noop", {}, 3, 1)["time"]) == 3
    assert states() == {"T"}


def test_stopped_torch_peers_end_with_their_parent():
    program = (
        "import os, sys; from mpirpc.cli.bench_peers import TorchPeers\n"
        "peers = TorchPeers([[*os.sched_getaffinity(0)]] * 2)\n"
        "print(*(process.pid for process in peers._processes), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_peers_do_not_inherit_the_launcher():
    found = peer_environment({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "0", "HOME": "/h"})
    assert found == {"HOME": "/h", "PYTHONSAFEPATH": "1"}


# --- rows, targets, table ---


def test_every_specified_row_exists_and_can_be_measured():
    rows = all_rows(Scope(num_ranks=4, max_nbytes=256 * MIB, idle=1.0))
    names = [row.name for row in rows]
    assert set(SPECIFIED) <= set(names)
    assert len(set(names)) == len(names)
    assert {row.work for row in rows} == {*WORK, "cycle"}
    assert sizes(64 * MIB)[-1] == 64 * MIB


class SlowToStart:
    """A side each block of which takes a while before its first repeat, on a clock of its own."""

    name = "slow"

    def __init__(self, once, each):
        self.once, self.each, self.now = once, each, 0.0

    def perf_counter(self):
        return self.now

    def measure(self, work, parameters, count, warm):
        self.now += self.once + count * self.each


@pytest.mark.parametrize("once", [0.0, 0.04])
@pytest.mark.parametrize("each", [1e-5, 1e-2, 1.0])
def test_blocks_are_filled_whatever_starting_one_takes(monkeypatch, once, each):
    side = SlowToStart(once, each)
    monkeypatch.setattr(bench_run, "time", side)
    row = Row("x", "noop", most=1_000_000)
    count = bench_run._find_count(row, side, bench_run.Plan(rounds=1, block_time=0.15))
    assert count == 2 or 0.07 < once + count * each < 0.3


def test_targets_are_judged_in_the_right_direction():
    results = {
        "fast": result_of({OURS: [1.0] * 100, TORCH: [10.0], RAW: [0.7]}),
        "slow": result_of({OURS: [2.0, 5.0]}),
        "tail": result_of({OURS: [1.0] * 98 + [9.0] * 2}),
    }
    judged = {
        (target.text, row): target.is_met(results, row)
        for row in results
        for target in (times_faster(10, TORCH), times_faster(0.8, RAW), short_tail(4), at_most(3, "3 s"))
    }
    assert judged == {
        (">= 10x torch", "fast"): True,
        (">= 0.8x mpi4py", "fast"): False,
        ("p99 <= 4x p50", "fast"): True,
        ("<= 3 s", "fast"): True,
        (">= 10x torch", "slow"): None,
        (">= 0.8x mpi4py", "slow"): None,
        ("p99 <= 4x p50", "slow"): None,
        ("<= 3 s", "slow"): False,
        (">= 10x torch", "tail"): None,
        (">= 0.8x mpi4py", "tail"): None,
        ("p99 <= 4x p50", "tail"): False,
        ("<= 3 s", "tail"): True,
    }
    assert rate_of_row(0.8, "fast").is_met(results, "slow") is False
    assert rate_of_row(0.2, "fast").is_met(results, "slow") is True
    assert rate_of_row(0.8, "not measured").is_met(results, "slow") is None


ABOUT = {
    "date": "today",
    "command": "mpirun",
    "cpu": "a CPU",
    "cores": 2,
    "cores_per_rank": [1, 1],
    "load_average_at_start": 0.1,
    "nodes": 1,
    "ranks": 2,
    "mpi": "an MPI",
    "mpi_standard": "4.1",
    "thread_level": "multiple",
    "torch": "2",
    "mpi4py": "4",
    "python": "3",
    "mpirpc": "0",
    "commit": None,
}


def test_table_shows_ratios_failures_and_verdicts():
    rows = [
        Row("quick", "noop", targets=(times_faster(10, TORCH),)),
        Row("broken", "add"),
        Row("memory", "memory", unit="payload"),
    ]
    results = {
        "quick": result_of({OURS: [2e-5], TORCH: [3e-4]}, messages=2.0, nbytes=210.0),
        "broken": Result(failures={OURS: "OddError: why"}),
        "memory": result_of({OURS: [0.0], TORCH: [1.0]}),
    }
    table = as_table(ABOUT, rows, results)
    assert re.search(r"^quick +20 us +300 us +15 +2 +210 +>= 10x torch: yes$", table, re.MULTILINE)
    assert re.search(r"^broken +failed", table, re.MULTILINE)
    assert re.search(r"^memory +0.00 x +1.00 x$", table, re.MULTILINE)
    assert "failed: broken: mpirpc: OddError: why" in table
    assert "targets: 1 met, 0 missed, 0 not judged" in table


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5e-5, "s", "25 us"),
        (1.2e-3, "s", "1.2 ms"),
        (2.0, "s", "2 s"),
        (1e-4, "1/s", "10,000 /s"),
        (0.015, "core", "1.5 %"),
        (3 * MIB, "B", "3 MiB"),
        (1.0, "payload", "1.00 x"),
    ],
)
def test_values_are_shown_in_units_of_people(value, unit, text):
    assert value_text(value, unit) == text


# --- the picture ---


def test_plot_is_drawn_from_the_echoes(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib: extra bench")
    from mpirpc.cli.bench_plot import draw

    rows = [Row(f"echo {nbytes}", "echo", {"nbytes": nbytes}) for nbytes in sizes(MIB)]
    results = {row.name: result_of({OURS: [1e-4], TORCH: [1e-3]}) for row in rows}
    assert draw(str(tmp_path / "x.png"), ABOUT, rows, results)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not draw(str(tmp_path / "y.png"), ABOUT, [Row("no-op", "noop")], {"no-op": Result()})


# --- the command line ---


@pytest.mark.parametrize(
    "options",
    [["--max-size", "1T"], ["--max-size", "3"], ["--idle", "0"], ["--peer", "x"], ["--rows", "("]],
)
def test_unfit_options_are_refused_before_mpi_starts(options, capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["bench", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err
