"""Figures of the benchmarks, the same bytes for the same numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot

matplotlib.rcParams.update({"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "font.size": 8})

Points = Mapping[Any, float]


def draw_bars(path: Path, bars: Mapping[str, float], label: str, line: float = 1) -> None:
    """Bars by name, and a dashed line at the value that they are compared with."""
    figure, axis = pyplot.subplots(figsize=(6, 0.6 + 0.25 * len(bars)), layout="constrained")
    axis.barh(list(bars), list(bars.values()))
    axis.invert_yaxis()
    axis.axvline(line, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel=label)
    save(figure, path)


def draw_lines(path: Path, lines: Mapping[str, Points], label: str, unit: str, line: float = 1) -> None:
    """Lines over numbers or names, and a dashed line at the value that they are compared with; from 0 on."""
    figure, axis = pyplot.subplots(figsize=(5, 3), layout="constrained")
    draw(axis, lines)
    axis.axhline(line, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel=label, ylabel=unit, ylim=(0, None))
    save(figure, path)


def draw_shares(path: Path, bars: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Bars by name, each made of its parts, of which all bars have the same."""
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.4 * len(bars)), layout="constrained")
    left = np.zeros(len(bars))
    for part in next(iter(bars.values())):
        widths = np.array([parts[part] for parts in bars.values()])
        axis.barh(list(bars), widths, left=left, label=part)
        left += widths
    axis.invert_yaxis()
    axis.set(xlabel=label)
    figure.legend(loc="outside upper center", ncols=4, fontsize=7)
    save(figure, path)


def draw_grid(path: Path, rows: Mapping[str, Mapping[str, Mapping[str, Points]]]) -> None:
    """Plots with logarithmic axes: a row for each unit, and in it a plot for each label. A row has one scale."""
    figure, axes = pyplot.subplots(
        len(rows), len(next(iter(rows.values()))), figsize=(13, 2.5 * len(rows)), sharey="row", squeeze=False
    )
    figure.set_layout_engine("constrained")
    for of_row, (unit, plots) in zip(axes, rows.items(), strict=True):
        of_row[0].set_ylabel(unit)
        values = [value for lines in plots.values() for points in lines.values() for value in points.values()]
        for axis, (label, lines) in zip(of_row, plots.items(), strict=True):
            axis.set(xscale="log", yscale="log", xlabel=label)
            draw(axis, lines)
            axis.minorticks_off()
        of_row[0].set_ylim(10 ** np.floor(np.log10(min(values))), 10 ** np.ceil(np.log10(max(values))))
    save(figure, path)


def draw(axis: Any, lines: Mapping[str, Points]) -> None:
    for name, points in lines.items():
        axis.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
    axis.grid(True, which="major", linewidth=0.3)
    axis.legend(fontsize=7)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
