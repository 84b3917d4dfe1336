"""Options and output that the benchmarks share."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser for a benchmark with options of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line")
    return parser


def parse(description: str | None) -> argparse.Namespace:
    parser = make_parser(description)
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Milliseconds of each case by ``statistic``; the cases run as in ``take_turns``."""
    return {name: statistic(times) for name, times in take_turns(cases, repeats).items()}


def take_turns(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run but the first; the cases take turns, so that a noisy spell meets them all."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(repeats):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def show(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    show_tables({"rows": rows}, as_json)


def show_tables(tables: Mapping[str, Sequence[Mapping[str, object]]], as_json: bool) -> None:
    """One table below the other, and if asked for all of them in one JSON object on the last line."""
    for rows in tables.values():
        columns = list(rows[0])
        cells = [[f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for line in [columns, *cells]:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        print()
    if as_json:
        print(json.dumps(tables))
