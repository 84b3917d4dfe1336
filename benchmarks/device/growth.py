"""How the time of a decode step grows: with batch, context, mixed lengths, window, cache, number of sizes and layers.

Two curves each. Host: this thread's CPU time from the scheduler's output to the tokens, in microseconds, what graphs
compute taken out. Device: the compiled model graph alone on PJRT CPU, in milliseconds, at just the size the step has,
the bundled model's shapes with random weights; the least of the repeats. `exponent` is the slope of log time over log
size by least squares, `at the end` that between the two largest: a fixed cost bends the first, the second shows the
law.

    python -m benchmarks.device.growth [--plot docs/plots/growth.svg]
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import linregress

from benchmarks.harness.batch import Batch, Graph, host_time, least, model_graph
from benchmarks.harness.report import make_parser, progress, show
from benchmarks.harness.workers import ExactWorker, HostWorker, worker
from model_runner_base import BucketPolicy, StepLimits

SHORT = 256
"""Tokens of context where something else grows; whole KV tiles."""
WINDOW = 1024
ROWS = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of what grows."""

    batches: Sequence[int] = (1, 4, 16, 64, 256, 1024)
    contexts: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    mixed_contexts: Sequence[int] = (512, 1024, 2048, 4096)
    layers: Sequence[int] = (1, 2, 4, 8, 16)
    cache_tokens: Sequence[int] = (1 << 15, 1 << 17, 1 << 19)
    num_sizes: Sequence[int] = (10, 100, 1000)


QUICK = Sizes((1, 4), (512, 1024), (512, 1024), (1, 2), (1 << 14, 1 << 15), (10, 100))
SHARES = np.array([1, 1, 2, 2, 4, 8, 16, 30]) / 64
"""Share of each row in a mixed batch's tokens."""
FEW_ROWS = "batch 4"
"""The graph that is timed when few graphs are compiled, and again when all are."""
MODEL = {"max_position_embeddings": 16384}
LIMITS = {"max_model_len": 16384, "max_num_seqs": 1024, "max_num_batched_tokens": 2048}
AXES = {
    "batch": "batch (rows)",
    "context": "context (tokens a row, 8 rows)",
    "cache tokens": "KV cache (tokens)",
    "layers": "layers",
    "number of sizes": "sizes of the policy, graphs compiled",
}
"""Plots, and their axes. Curves whose name begins alike share one."""


@dataclass
class Curve:
    """Times of one side, host in microseconds or device in milliseconds, by the size that grows."""

    grows: str
    side: str
    points: dict[int, float] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        sizes, times = np.array(list(self.points.items())).T
        x, y = np.log(sizes), np.log(times)
        return {
            "grows": self.grows,
            "side": self.side,
            "from": int(sizes[0]),
            "to": int(sizes[-1]),
            "first": float(times[0]),
            "last": float(times[-1]),
            "exponent": float(linregress(x, y).slope),
            "at the end": float((y[-1] - y[-2]) / (x[-1] - x[-2])),
        }


def uniform(context: int, rows: int = ROWS) -> list[int]:
    """Lengths of as many KV tiles as ``context`` tokens have, with space to grow. Rows reach a new block in turn."""
    return [context - SHORT // 2 + row % 32 for row in range(rows)]


def mixed(context: int) -> list[int]:
    """Lengths with the tokens and KV tiles of ``uniform``, given to the rows by SHARES."""
    num_tiles = ROWS * context // SHORT
    tiles = np.maximum(1, SHARES * num_tiles).astype(int)
    tiles[-1] += num_tiles - tiles.sum()
    return [length + (count * SHORT - context) for length, count in zip(uniform(context), tiles.tolist(), strict=True)]


def dispatch_time(policy: BucketPolicy, limits: StepLimits, num_sizes: int) -> float:
    """Microseconds that a step of a size that was not seen before waits for its graph's."""
    policy.set_sizes([limits.decode_size(ROWS, ROWS + index) for index in range(num_sizes)])
    needs = [limits.decode_size(ROWS, ROWS - index) for index in range(ROWS)]
    start = time.thread_time()
    for need in needs:
        policy.dispatch(need)
    return (time.thread_time() - start) / len(needs) * 1e6


def host_curves(grown: Sizes) -> list[Curve]:
    names = ("batch", "context", "context, mixed lengths", "number of sizes")
    batch, context, lengths, sizes = curves = [Curve(name, "host") for name in names]
    with worker(HostWorker, 1 << 19, MODEL | {"num_hidden_layers": 1}, **LIMITS) as bare:
        for _ in range(2):  # The first round makes the graphs.
            batch.points = {rows: host_time(bare, uniform(SHORT, rows)) for rows in grown.batches}
            context.points = {tokens: host_time(bare, uniform(tokens)) for tokens in grown.contexts}
            lengths.points = {tokens: host_time(bare, mixed(tokens)) for tokens in grown.mixed_contexts}
        runner: Any = bare.model_runner
        policy, limits = runner.graph_policy, runner.parts.layout.limits
        sizes.points = {count: dispatch_time(policy, limits, count) for count in grown.num_sizes}
    layers, cache = Curve("layers", "host"), Curve("cache tokens", "host")
    for count in grown.layers[:: len(grown.layers) - 1]:
        with worker(HostWorker, 1 << 14, MODEL | {"num_hidden_layers": count}, **LIMITS) as bare:
            layers.points[count] = host_time(bare, uniform(SHORT))
    for tokens in grown.cache_tokens[:: len(grown.cache_tokens) - 1]:
        with worker(HostWorker, tokens, MODEL | {"num_hidden_layers": 1}, **LIMITS) as bare:
            cache.points[tokens] = host_time(bare, uniform(SHORT))
    return [*curves, layers, cache]


def device_curves(grown: Sizes, repeats: int) -> list[Curve]:
    """Curves of one engine."""
    # The largest batch first: tracing takes sizes of 1 for constants.
    lengths = {("batch", rows): uniform(SHORT, rows) for rows in reversed(grown.batches)}
    lengths |= {("context", tokens): uniform(tokens) for tokens in grown.contexts}
    lengths |= {("context, mixed lengths", tokens): mixed(tokens) for tokens in grown.mixed_contexts}
    graphs: dict[str, Graph] = {}
    sizes = Curve("graphs compiled", "device")
    with worker(ExactWorker, 1 << 18, MODEL, **LIMITS) as exact:
        for (grows, size), rows in progress(lengths.items(), "compiled", total=len(lengths)):
            name = f"{grows} {size}"
            graphs[name] = model_graph(Batch(exact, rows))
            if name == FEW_ROWS:
                sizes.points[len(graphs)] = least({name: graphs[name]}, repeats)[name]
        times = least(graphs, repeats)
        sizes.points[len(graphs)] = least({FEW_ROWS: graphs[FEW_ROWS]}, repeats)[FEW_ROWS]
    curves = [
        Curve(name, "device", {size: times[f"{name} {size}"] for grows, size in sorted(lengths) if grows == name})
        for name in ("batch", "context", "context, mixed lengths")
    ]
    return [*curves, sizes]


def engine_curve(name: str, engines: dict[int, tuple[int, dict[str, Any]]], repeats: int) -> Curve:
    """A curve whose points need an engine each, of these numbers of cache tokens and model configs."""
    curve = Curve(name, "device")
    for size, (cache_tokens, config) in engines.items():
        with worker(ExactWorker, cache_tokens, MODEL | config, **LIMITS) as exact:
            curve.points[size] = least({name: model_graph(Batch(exact, uniform(SHORT)))}, repeats)[name]
    return curve


def window_curve(contexts: Sequence[int], repeats: int) -> Curve:
    curve = Curve(f"context, window {WINDOW}", "device")
    window = {"layer_types": ["sliding_attention"] * 5, "sliding_window": WINDOW}
    with worker(ExactWorker, 1 << 18, MODEL | window, **LIMITS) as exact:
        cases = {str(tokens): model_graph(Batch(exact, uniform(tokens))) for tokens in contexts}
        curve.points = {int(tokens): time for tokens, time in least(cases, repeats).items()}
    return curve


def draw(path: Path, curves: list[Curve]) -> None:
    """Draws host above, device below, and a column for each thing that grows."""
    from benchmarks.harness.plots import draw_grid

    rows: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for side, unit in (("host", "host µs a step"), ("device", "device ms a step")):
        rows[unit] = {label: {} for label in AXES.values()}
        for curve in curves:
            name = "number of sizes" if curve.grows == "graphs compiled" else curve.grows.split(",")[0]
            if curve.side == side:
                rows[unit][AXES[name]][curve.grows] = curve.points
    draw_grid(path, rows)


def main() -> None:
    args = make_parser(__doc__, repeats=7, has_plot=True).parse_args()
    repeats, grown = (1, QUICK) if args.quick else (args.repeats, Sizes())
    caches: dict[int, tuple[int, dict[str, Any]]] = {tokens: (tokens, {}) for tokens in grown.cache_tokens}
    depths = {count: (1 << 14, {"num_hidden_layers": count}) for count in grown.layers}
    further: dict[str, Callable[[], Curve]] = {
        "a window": lambda: window_curve(grown.contexts, repeats),
        "caches": lambda: engine_curve("cache tokens", caches, repeats),
        "layers": lambda: engine_curve("layers", depths, repeats),
    }
    with progress((), "host", total=2 + len(further)) as bar:
        curves = host_curves(grown)
        bar.update()
        curves += device_curves(grown, repeats)
        for name, make in further.items():
            bar.set_description(name)
            bar.update()
            curves.append(make())
        bar.update()
    rows = [curve.row() for curve in curves]
    show(rows, False)
    if args.plot:
        draw(args.plot, curves)
    if args.json:
        points = [{**row, "points": curve.points} for row, curve in zip(rows, curves, strict=True)]
        print(json.dumps({"curves": points}))


if __name__ == "__main__":
    main()
