"""The picture of a benchmark: our time over every other implementation's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from hf_entmax.bench.runner import Measurement


def plot_ratios(rows: Sequence[Measurement], path: Path) -> Figure:
    """Draw the ratios as horizontal bars on a logarithmic axis, with the targets as marks, and save the figure."""
    shown = [row for row in rows if row.ratio is not None]
    names = sorted({row.implementation for row in shown})
    figure = Figure(figsize=(9, 1.2 + 0.24 * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        assert row.ratio is not None
        color = f"C{names.index(row.implementation)}"
        axes.barh(place, row.ratio, left=0, color=color)
        axes.text(row.ratio, place, f" {row.ratio:.2g}", va="center", fontsize=7)
        if row.target is not None:
            axes.plot([row.target], [place], marker="|", markersize=12, color="black")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [f"{row.case} | {row.mode} | {row.implementation}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("our time or memory over theirs (left of the line: ours is better); black marks: targets")
    figure.savefig(path, dpi=150)
    return figure
