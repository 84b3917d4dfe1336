"""Figures of the benchmarks, the same bytes for the same numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.curve import Curve

matplotlib.rcParams.update({"svg.hashsalt": "growth", "svg.fonttype": "none", "font.size": 8})

FACETS = {
    "batch": "batch (rows)",
    "context": "context (tokens a row, 8 rows)",
    "cache tokens": "KV cache (tokens)",
    "layers": "layers",
    "number of sizes": "sizes of the policy, graphs compiled",
}
"""Facets, and their axes. Curves whose name begins alike share one."""
ALSO = {"graphs compiled": "number of sizes"}


def draw_curves(curves: Sequence[Curve], directory: Path) -> None:
    """``growth.svg``: host above, device below, a column for each thing that grows; each side has one scale."""
    figure, axes = pyplot.subplots(2, len(FACETS), figsize=(13, 5), sharey="row", layout="constrained")
    for row, (side, unit) in enumerate((("host", "host µs a step"), ("device", "device ms a step"))):
        axes[row][0].set_ylabel(unit)
        for column, (facet, label) in enumerate(FACETS.items()):
            axis = axes[row][column]
            axis.set(xscale="log", yscale="log", xlabel=label)
            axis.grid(True, which="major", linewidth=0.3)
            for curve in curves:
                if curve.side == side and ALSO.get(curve.grows, curve.grows.split(",")[0]) == facet:
                    axis.plot(*zip(*curve.points.items(), strict=True), marker="o", markersize=3, label=curve.grows)
            axis.minorticks_off()
            axis.legend(fontsize=7)
        bottom, top = axes[row][0].get_ylim()
        axes[row][0].set_ylim(10 ** np.floor(np.log10(bottom)), 10 ** np.ceil(np.log10(top)))
    _save(figure, directory / "growth.svg")


def draw_trade(rows: Mapping[str, Sequence[Mapping[str, Any]]], directory: Path) -> None:
    """``padding.svg``: padding over the number of graphs, a line for each title in ``rows``."""
    figure, axis = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for title, lines in rows.items():
        axis.plot([r["graphs"] for r in lines], [r["all, CPU"] for r in lines], marker="o", markersize=3, label=title)
    axis.axhline(15, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel="graphs", ylabel="% of the work that is padding", ylim=(0, None))
    axis.grid(True, linewidth=0.3)
    axis.legend(fontsize=7)
    _save(figure, directory / "padding.svg")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
