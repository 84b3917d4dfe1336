"""Options, turns, a progress bar, and output that the benchmarks share."""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

tqdm.monitor_interval = 0  # Else a thread of the bar would run next to what is timed.
T = TypeVar("T")
TURN, SETTLING = 64, 8
"""Steps of a turn that count, and steps before them that do not."""
NARROWEST = 10
"""Characters of the narrowest column of a table that is shown row by row."""


def make_parser(
    description: str | None, repeats: int | None = None, has_plot: bool = False, has_quick: bool = True
) -> argparse.ArgumentParser:
    """Parser with options that benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line")
    if has_quick:
        parser.add_argument(
            "--quick", action="store_true", help="the smallest form, which shows that the command works"
        )
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="timed runs of each case")
    if has_plot:
        parser.add_argument("--plot", type=_plot_path, metavar="FILE", help="draw the figure into this file, as SVG")
    return parser


def _plot_path(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing: pip install -e '.[benchmarks]'")
    return Path(text)


def progress(items: Iterable[T], title: str, total: int | None = None) -> "tqdm[T]":
    """Iterator over ``items`` with a bar on the error stream, if that is a terminal."""
    return tqdm(items, desc=title, total=total, file=sys.stderr, disable=None)


def take_turns(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run but the first; the cases take turns, so that a noisy spell meets them all."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with tqdm(total=(1 + repeats) * len(cases), desc="runs", leave=False, file=sys.stderr, disable=None) as bar:
        for turn in range(1 + repeats):
            for name, case in cases.items():
                start = time.perf_counter()
                case()
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3)
                bar.update()
    return times


def steps_in_turns(
    steps: Mapping[str, Callable[[], T]], count: int, turn: int = TURN, settling: int = SETTLING
) -> dict[str, list[T]]:
    """Results of ``count`` steps of each; the garbage collector rests.

    They take turns of ``turn`` steps. Before a turn come ``settling`` steps that do not count: the processor's caches
    hold what the others left there. With turns of one step there are none.
    """
    results: dict[str, list[T]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for start in range(0, count, turn):
        for name, step in steps.items():
            for _ in range(settling if turn > 1 else 0):
                step()
            results[name] += [step() for _ in range(min(turn, count - start))]
    gc.enable()
    return results


Table = Sequence[Mapping[str, object]]


def show(rows: Table, as_json: bool) -> None:
    """A table, and if asked for its rows in a JSON object on the last line."""
    lines = [list(rows[0]), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(_line(line, widths))
    print()
    if as_json:
        print(json.dumps({"rows": rows}))


def show_row(row: Mapping[str, object], width: int, has_header: bool) -> None:
    """A row of a table while others are still measured; ``width`` is that of its first column, in characters."""
    widths = [width, *(max(len(column), NARROWEST) for column in list(row)[1:])]
    for line in [list(row), _cells(row)] if has_header else [_cells(row)]:
        tqdm.write(_line(line, widths))
    sys.stdout.flush()


def _cells(row: Mapping[str, object]) -> list[str]:
    return [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
