"""``mpirun -n 2 python -m mpirpc bench``: what calls cost, beside torch's own RPC and beside MPI alone.

Rank 0 measures, the others serve. The peers are optional: ``--peer torch`` starts TensorPipe workers in
processes of their own, ``--peer mpi4py`` plays ping-pong between ranks 0 and 1, ``--peer futures`` runs
``mpi4py.futures``. How to read the figures is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

import torch

import mpirpc as rpc
from mpirpc.cli import bench_mpi_peer, bench_plot, bench_report, bench_work
from mpirpc.cli.bench_mpi_peer import RawMPI, World
from mpirpc.cli.bench_peers import Ours, PeerError, Side, TorchPeers, install_mpirpc
from mpirpc.cli.bench_rows import (
    BURST,
    FUTURES,
    MIB,
    OURS,
    TORCH,
    Result,
    Row,
    Scope,
    Summary,
    all_rows,
)
from mpirpc.cli.bench_run import FULL, QUICK, measure_rows
from mpirpc.cli.terminal import terminal

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

HELP = "measure calls, beside torch's own RPC and MPI alone"

PEERS = ("torch", "mpi4py", "futures")

ONE_RANK = """\
bench needs two or more MPI ranks, and this job has one
hint: start it with: mpirun -n 2 python -m mpirpc bench"""

NO_MATPLOTLIB = """\
--plot needs matplotlib, and it is not installed
hint: pip install mpirpc[bench]"""

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench``."""
    parser.add_argument(
        "--peer", action="append", choices=PEERS, default=[], help="measure this too; may be repeated"
    )
    parser.add_argument("--rows", type=_pattern, default=None, help="only rows whose name matches this regex")
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it works, no more")
    parser.add_argument(
        "--max-size", type=_size, default=None, help="largest tensor, as 256M (64M; 1M with --quick)"
    )
    parser.add_argument(
        "--idle", type=_seconds, default=None, help="seconds of doing nothing (5; 0.5 with --quick)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--plot", metavar="FILE", help="draw time and bandwidth over size there, as x.png")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    nbytes = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 << 10 <= nbytes <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 1K to 1G, as 256M")
    return nbytes


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark on this rank: rank 0 drives, the others serve until it is over.

    Returns:
        Exit status: 0; 1 if a row failed; 2 if it could not begin.
    """
    world = bench_mpi_peer.world()
    rows = _chosen_rows(arguments, world.size)
    refusal = _refusal(arguments, world, rows)
    if refusal:
        if world.rank == 0:
            print(refusal, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    install_mpirpc(world.rank, world.size)
    with bench_mpi_peer.ending_job_on_error():
        bench_mpi_peer.make_ping_pong_comm()
        futures = _measure_futures(arguments)
        rpc.init_rpc()
        if world.rank == 0:
            return _drive(arguments, world, rows, futures)
        rpc.shutdown()
        for _ in range(_num_cycles(arguments, rows)):
            _cycle()
        return 0


def _chosen_rows(arguments: argparse.Namespace, num_ranks: int) -> list[Row]:
    """The rows to measure; the same on every rank."""
    max_nbytes = arguments.max_size or (MIB if arguments.quick else 64 * MIB)
    idle = arguments.idle or (0.5 if arguments.quick else 5.0)
    rows = all_rows(Scope(num_ranks, max_nbytes, idle))
    return [row for row in rows if arguments.rows is None or arguments.rows.search(row.name)]


def _refusal(arguments: argparse.Namespace, world: World, rows: Sequence[Row]) -> str:
    """Say why the benchmark cannot run; nothing if it can."""
    if world.size < 2:
        return ONE_RANK
    if not rows:
        names = "\n  ".join(row.name for row in all_rows(Scope(world.size, 256 * MIB, 5.0)))
        return f"--rows {arguments.rows.pattern!r} matches none of these:\n  {names}"
    if "mpi4py" in arguments.peer and world.thread_level != "multiple":
        return f"--peer mpi4py needs MPI_THREAD_MULTIPLE, and this MPI grants {world.thread_level}"
    if arguments.plot and bench_plot.matplotlib_is_missing():
        return NO_MATPLOTLIB
    return ""


def _measure_futures(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """``mpi4py.futures`` has the ranks to itself, before RPC starts: it is not interleaved."""
    if "futures" not in arguments.peer:
        return {}
    return bench_mpi_peer.measure_futures(20 if arguments.quick else 2000, 100 if arguments.quick else BURST)


def _num_cycles(arguments: argparse.Namespace, rows: Sequence[Row]) -> int:
    """How often every rank starts and stops RPC, for the row that times it."""
    plan = QUICK if arguments.quick else FULL
    return plan.rounds if any(row.work == "cycle" for row in rows) else 0


def _cycle() -> float:
    bench_mpi_peer.wait_for_all()
    start = time.perf_counter()
    rpc.init_rpc()
    rpc.shutdown()
    return time.perf_counter() - start


# --- rank 0 ---


def _drive(
    arguments: argparse.Namespace, world: World, rows: Sequence[Row], futures: dict[str, list[float]]
) -> int:
    """What rank 0 does, RPC running; returns the exit status."""
    cpus = [rpc.rpc_sync(rank, bench_work.cpus) for rank in range(world.size)]
    num_nodes = len({rpc.rpc_sync(rank, bench_mpi_peer.host) for rank in range(world.size)})
    about = bench_report.describe(world, num_nodes, cpus, shlex.join(_command_line()))
    problem = _unwritable(arguments)
    if problem:
        print(problem, file=sys.stderr)
        rpc.shutdown()
        for _ in range(_num_cycles(arguments, rows)):
            _cycle()
        return 2
    with _torch_peers(arguments, cpus) as peers, _Progress(len(rows)) as progress:
        results = _measure(arguments, rows, peers, progress)
    _add_futures(rows, results, futures)
    return _report(arguments, about, rows, results)


def _command_line() -> list[str]:
    """What follows ``python -m mpirpc bench``."""
    return sys.argv[sys.argv.index("bench") + 1 :] if "bench" in sys.argv else sys.argv[1:]


def _unwritable(arguments: argparse.Namespace) -> str:
    """Find out before the work, not after it."""
    for path in filter(None, (arguments.json, arguments.plot)):
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
    return ""


@contextlib.contextmanager
def _torch_peers(arguments: argparse.Namespace, cpus: Sequence[Sequence[int]]) -> Iterator[TorchPeers | None]:
    if "torch" not in arguments.peer:
        yield None
        return
    peers = TorchPeers(cpus)
    try:
        yield peers
    finally:
        peers.close()


def _measure(
    arguments: argparse.Namespace, rows: Sequence[Row], peers: TorchPeers | None, progress: _Progress
) -> dict[str, Result]:
    """All rows but the last, then RPC ends here; the last row starts and stops it again."""
    sides: list[Side] = [Ours()]
    if peers is not None:
        sides.append(peers)
    if "mpi4py" in arguments.peer:
        sides += [RawMPI(fresh=False), RawMPI(fresh=True)]
    plan = QUICK if arguments.quick else FULL
    results = measure_rows([row for row in rows if row.work != "cycle"], sides, plan, progress.tell)
    rpc.shutdown()
    for row in rows:
        if row.work == "cycle":
            results[row.name] = _measure_cycles(row, _num_cycles(arguments, rows), peers, progress)
    return results


def _measure_cycles(row: Row, count: int, peers: TorchPeers | None, progress: _Progress) -> Result:
    """Start and stop both libraries by turns. Our cycles are all made whatever happens: other ranks wait."""
    result = Result()
    ours: list[float] = []
    theirs: list[float] = []
    if peers is not None:
        with peers.awake():
            peers.leave()
    for number in range(count):
        progress.tell(row.name, f"block {number + 1} of {count}")
        ours.append(_cycle())
        if peers is None or TORCH in result.failures:
            continue
        try:
            with peers.awake():
                theirs.append(peers.cycle())
        except PeerError as error:
            result.failures[TORCH] = str(error).strip().splitlines()[-1]
    result.sides[OURS] = Summary.of(ours)
    if theirs and TORCH not in result.failures:
        result.sides[TORCH] = Summary.of(theirs)
    progress.tell(row.name, "")
    return result


def _add_futures(rows: Sequence[Row], results: dict[str, Result], futures: dict[str, list[float]]) -> None:
    for row in rows:
        if futures.get(row.work):
            results[row.name].sides[FUTURES] = Summary.of(futures[row.work])


def _report(
    arguments: argparse.Namespace, about: dict[str, object], rows: Sequence[Row], results: dict[str, Result]
) -> int:
    """Print and write the result; returns the exit status."""
    print(bench_report.as_table(about, rows, results), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(bench_report.as_json(about, rows, results))
    if arguments.plot and not bench_plot.draw(arguments.plot, about, rows, results):
        os.unlink(arguments.plot)
        print("nothing to plot: no echo was measured, see --rows", file=sys.stderr)
    return 1 if any(result.failures for result in results.values()) else 0


class _Progress:
    """A bar on the terminal; without one a line for each row when it is done, on standard error."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_done = 0
        self._bar = None
        stream = None if tqdm is None else terminal()
        if stream is not None:
            # A rank's terminal often does not know its size; tqdm would take that for no room at all.
            columns, lines = shutil.get_terminal_size(fallback=(100, 24))
            self._bar = tqdm(total=num_rows, unit="row", file=stream, ncols=columns, nrows=lines, leave=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def tell(self, row: str, doing: str) -> None:
        """Say what is being done for a row; with nothing, that it is done."""
        self._num_done += not doing
        if self._bar is not None:
            self._bar.set_postfix_str(f"{row}: {doing}" if doing else row)
            self._bar.update(not doing)
        elif not doing:
            print(f"[{self._num_done}/{self._num_rows}] {row}", file=sys.stderr, flush=True)
