"""The picture that ``bench --plot`` draws: how long a call with a tensor takes, how many bytes a second pass.

For readers who know neither mpirpc nor MPI: every line is named in words, axes have units that people use.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpirpc.cli.bench_rows import OURS, RAW, RAW_FRESH, TORCH, Results, Row, size_text

LINES = {
    OURS: ("mpirpc", "#0b6e99", "o-", 2.4),
    TORCH: ("torch.distributed.rpc (TensorPipe)", "#d1495b", "s-", 1.8),
    RAW: ("MPI alone, no RPC (mpi4py, buffers reused)", "#555555", "^--", 1.2),
    RAW_FRESH: ("MPI alone, into new memory each time", "#999999", "v:", 1.2),
}
"""For each side: its name for readers, colour, marks, width."""

GIGABYTE = 1e9


def matplotlib_is_missing() -> bool:
    """Say so before anything is measured."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return True
    return False


def draw(path: str, about: Mapping[str, Any], rows: Sequence[Row], results: Results) -> bool:
    """Write the picture, in the format that the file's name ends with.

    Returns:
        False if no echo was measured, so that there is nothing to draw.
    """
    figure_module = importlib.import_module("matplotlib.figure")  # slow, and for rank 0 with --plot only
    curves = _curves(rows, results)
    if not curves:
        return False
    figure = figure_module.Figure(figsize=(12, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side, points in curves.items():
        label, colour, marks, width = LINES[side]
        style = {"label": label, "color": colour, "linewidth": width, "markersize": 5}
        nbytes = [size for size, _ in points]
        left.plot(nbytes, [seconds * 1e6 for _, seconds in points], marks, **style)
        right.plot(nbytes, [2 * size / seconds / GIGABYTE for size, seconds in points], marks, **style)
    _finish_axes(left, curves, "Time of one call (lower is better)", "microseconds, median")
    _finish_axes(right, curves, "Data moved, both ways (higher is better)", "gigabytes per second")
    left.legend(frameon=False)
    figure.suptitle("One worker sends a tensor to a function on another worker, which returns it")
    figure.supxlabel(_caption(about), fontsize=8, color="#555555")
    figure.savefig(path, dpi=150)
    return True


def _curves(rows: Sequence[Row], results: Results) -> dict[str, list[tuple[int, float]]]:
    """For each side, (bytes, median seconds) of the echoes, smallest first."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.work != "echo" or row.name not in results:
            continue
        for side, summary in results[row.name].sides.items():
            curves.setdefault(side, []).append((row.parameters["nbytes"], summary.median))
    return {side: sorted(curves[side]) for side in LINES if side in curves}


def _finish_axes(axes: Any, curves: Mapping[str, Sequence[tuple[int, float]]], title: str, unit: str) -> None:
    nbytes = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel(unit)
    axes.set_xticks(nbytes, [size_text(size) for size in nbytes], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="major", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(about: Mapping[str, Any]) -> str:
    return (
        f"{about['ranks']} processes on {about['nodes']} machine(s), {about['cpu']}, {about['cores']} cores; "
        f"{about['mpi']}, torch {about['torch']}, mpirpc {about['mpirpc']}; {str(about['date'])[:10]}\n"
        f"{about['command']}"
    )
