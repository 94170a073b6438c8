"""What ``bench`` tells: the table for people, the JSON for programs, and what the figures were taken with."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mpirpc
from mpirpc.cli.bench_mpi_peer import World
from mpirpc.cli.bench_rows import OURS, SIDES, Results, Row, Summary

VERDICTS = {True: "yes", False: "NO", None: "?"}

LEGEND = """\
p50 is the median, p99 the 99th percentile; 'x' after a peer: how many times faster mpirpc is than that peer.
msgs and bytes are MPI messages and bytes of one operation, both directions."""


# --- what the figures were taken with ---


def describe(world: World, num_nodes: int, cpus: Sequence[Sequence[int]], arguments: str) -> dict[str, Any]:
    """Say on what, with what and how the figures were taken."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": f"mpirun -n {world.size} python -m mpirpc bench {arguments}".rstrip(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_per_rank": [len(own) for own in cpus],
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "nodes": num_nodes,
        "ranks": world.size,
        "mpi": world.library,
        "mpi_standard": world.standard,
        "thread_level": world.thread_level,
        "torch": torch.__version__,
        "mpi4py": _version("mpi4py"),
        "python": platform.python_version(),
        "mpirpc": mpirpc.__version__,
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith(("model name", "cpu model")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _commit() -> str | None:
    """The commit of the checkout that runs; None for an installed package."""
    folder = Path(mpirpc.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


# --- JSON ---


def as_json(about: Mapping[str, Any], rows: Sequence[Row], results: Results) -> str:
    """All that is known, in base units: seconds per operation, share of a core, bytes, payloads."""
    found = [_row_as_dict(row, results) for row in rows if row.name in results]
    return json.dumps({"about": about, "rows": found}, indent=1) + "\n"


def _row_as_dict(row: Row, results: Results) -> dict[str, Any]:
    result = results[row.name]
    peers = {side: result.ratio(side) for side in result.sides if side != OURS and row.has_ratios}
    return {
        "row": row.name,
        "measurement": row.work,
        "parameters": dict(row.parameters),
        "peer_parameters": None if row.peer_parameters is None else dict(row.peer_parameters),
        "unit": "s" if row.unit == "1/s" else row.unit,
        "shown_as": row.unit,
        "sides": {side: asdict(summary) for side, summary in result.sides.items()},
        "failures": result.failures,
        "ratios": {peer: ratio for peer, ratio in peers.items() if ratio is not None},
        "messages_per_operation": result.messages,
        "bytes_per_operation": result.nbytes,
        "targets": [
            {"target": target.text, "met": target.is_met(results, row.name)} for target in row.targets
        ],
    }


# --- table ---


def as_table(about: Mapping[str, Any], rows: Sequence[Row], results: Results) -> str:
    """The result for people."""
    found = [row for row in rows if row.name in results]
    peers = [side for side in SIDES[1:] if any(_is_known(results, row, side) for row in found)]
    header = ["row", "mpirpc p50", "p99"]
    for peer in peers:
        header += [peer, "x"]
    header += ["msgs", "bytes", "target: met?"]
    cells = [_cells(row, results, peers) for row in found]
    lines = [_about_text(about), "", *_aligned([header, *cells]), "", LEGEND, _count_text(found, results)]
    for row in found:
        lines += [f"failed: {row.name}: {side}: {why}" for side, why in results[row.name].failures.items()]
    return "\n".join(lines)


def _is_known(results: Results, row: Row, side: str) -> bool:
    return side in results[row.name].sides or side in results[row.name].failures


def _about_text(about: Mapping[str, Any]) -> str:
    cores = sorted(set(about["cores_per_rank"]))
    commit = f" (commit {about['commit']})" if about["commit"] else ""
    return "\n".join(
        [
            f"{about['date']}  {about['command']}",
            f"{about['ranks']} ranks on {about['nodes']} node(s): {about['cpu']}, {about['cores']} cores, "
            f"{'/'.join(map(str, cores))} usable by a rank; load before {about['load_average_at_start']}",
            f"{about['mpi']} (MPI {about['mpi_standard']}, thread level {about['thread_level']}), "
            f"mpi4py {about['mpi4py']}, torch {about['torch']}, Python {about['python']}, "
            f"mpirpc {about['mpirpc']}{commit}",
        ]
    )


def _cells(row: Row, results: Results, peers: Sequence[str]) -> list[str]:
    result = results[row.name]
    ours = result.sides.get(OURS)
    p99 = "" if ours is None or ours.p99 is None or row.unit != "s" else value_text(ours.p99, row.unit)
    cells = [row.name, _median_text(result.failures, ours, OURS, row.unit), p99]
    for peer in peers:
        ratio = result.ratio(peer) if row.has_ratios else None
        cells.append(_median_text(result.failures, result.sides.get(peer), peer, row.unit))
        cells.append("" if ratio is None else f"{ratio:.3g}")
    cells += [_count(result.messages), _count(result.nbytes)]
    verdicts = [f"{target.text}: {VERDICTS[target.is_met(results, row.name)]}" for target in row.targets]
    return [*cells, "; ".join(verdicts)]


def _median_text(failures: Mapping[str, str], summary: Summary | None, side: str, unit: str) -> str:
    if side in failures:
        return "failed"
    return "" if summary is None else value_text(summary.median, unit)


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}" if number < 1e4 else f"{number:.0f}"


def value_text(value: float, unit: str) -> str:
    """A value in base units, for people."""
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e6:.3g} us"
    if unit == "1/s":
        return f"{1 / value:,.0f} /s"
    if unit == "core":
        return f"{100 * value:.2g} %"
    if unit == "B":
        return f"{value / 2**20:.4g} MiB"
    return f"{round(value, 2) + 0.0:.2f} x"  # no minus before a zero


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Pad the columns: names and targets to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    last = len(widths) - 1
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _count_text(rows: Sequence[Row], results: Results) -> str:
    verdicts = [target.is_met(results, row.name) for row in rows for target in row.targets]
    return (
        f"targets: {verdicts.count(True)} met, {verdicts.count(False)} missed, "
        f"{verdicts.count(None)} not judged (a peer or another row is missing, or too few samples)"
    )
