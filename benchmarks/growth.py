"""How the time of a decode step grows: with batch, context, mixed lengths, window, cache, number of sizes and layers.

Two curves each. Host: this thread's CPU time from the scheduler's output to the tokens, in microseconds, what graphs
compute taken out. Device: the compiled model graph alone on PJRT CPU, in milliseconds, at just the size the step has,
the bundled model's shapes with random weights; the least of the repeats. `exponent` is the slope of log time over log
size by least squares, `at the end` that between the two largest: a fixed cost bends the first, the second shows the
law.

Then what attention pairs cost in these graphs against tokens, mixed lengths against uniform ones, and the table of
`benchmarks.padding` for the platform's limits.

    python -m benchmarks.growth [--plots docs/plots]
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks import padding
from benchmarks.bare_steps import Batch, ExactWorker, HostWorker, host_time, model_graph, waited, worker
from benchmarks.curve import Curve
from benchmarks.graphs import Graph, padded_graph
from benchmarks.report import interleaved, make_parser, show
from benchmarks.traffic import CHAT
from model_runner_base import BucketPolicy, StepLimits, StepSize
from model_runner_base.worker import ModelRunnerWorker

SHORT = 256
"""Tokens of context where something else grows; whole KV tiles."""
WINDOW = 1024
ROWS = 8
BATCHES = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MIXED_CONTEXTS = CONTEXTS[1:-2]
LAYERS = (1, 2, 4, 8, 16)
CACHE_TOKENS = (1 << 15, 1 << 17, 1 << 19)
NUM_SIZES = (10, 100, 1000)
SHARES = np.array([1, 1, 2, 2, 4, 8, 16, 30]) / 64
"""Share of each row in a mixed batch's tokens."""
PREFILLS = ((512, 4, 8, 8), (512, 4, 8, 40), (512, 64, 64, 64), (128, 4, 4, 4), (128, 4, 4, 40))
"""Tokens, requests, tiles and pairs of chunks in steps without decodes, for the weights."""
FEW_ROWS = "batch 4"
"""The graph that is timed when few graphs are compiled, and again when all are."""
MODEL = {"max_position_embeddings": max(CONTEXTS)}
LIMITS = {"max_model_len": max(CONTEXTS), "max_num_seqs": max(BATCHES), "max_num_batched_tokens": 2048}


def uniform(context: int, rows: int = ROWS) -> list[int]:
    """Lengths of as many KV tiles as ``context`` tokens have, with space to grow. Rows reach a new block in turn."""
    return [context - SHORT // 2 + row % 32 for row in range(rows)]


def mixed(context: int) -> list[int]:
    """Lengths with the tokens and KV tiles of ``uniform``, given to the rows by SHARES."""
    num_tiles = ROWS * context // SHORT
    tiles = np.maximum(1, SHARES * num_tiles).astype(int)
    tiles[-1] += num_tiles - tiles.sum()
    return [length + (count * SHORT - context) for length, count in zip(uniform(context), tiles.tolist(), strict=True)]


def limits_of(worker: ModelRunnerWorker) -> StepLimits:
    layout: Any = worker.model_runner.parts.layout
    return layout.limits


def least(graphs: dict[str, Graph], repeats: int) -> dict[str, float]:
    """Least milliseconds of each graph, since other work on the machine only adds."""
    return interleaved({name: graph.run for name, graph in graphs.items()}, repeats, min)


def dispatch_time(policy: BucketPolicy, limits: StepLimits, num_sizes: int) -> float:
    """Microseconds that a step of a size that was not seen before waits for its graph's."""
    policy.set_sizes([limits.decode_size(ROWS, ROWS + index) for index in range(num_sizes)])
    needs = [limits.decode_size(ROWS, ROWS - index) for index in range(ROWS)]
    start = time.thread_time()
    for need in needs:
        policy.dispatch(need)
    return (time.thread_time() - start) / len(needs) * 1e6


def host_curves() -> list[Curve]:
    names = ("batch", "context", "context, mixed lengths", "number of sizes")
    batch, context, lengths, sizes = curves = [Curve(name, "host") for name in names]
    with worker(HostWorker, 1 << 19, MODEL | {"num_hidden_layers": 1}, **LIMITS) as bare:
        for _ in range(2):  # The first round makes the graphs.
            batch.points = {rows: host_time(bare, uniform(SHORT, rows)) for rows in BATCHES}
            context.points = {tokens: host_time(bare, uniform(tokens)) for tokens in CONTEXTS}
            lengths.points = {tokens: host_time(bare, mixed(tokens)) for tokens in MIXED_CONTEXTS}
        policy: Any = bare.model_runner.graph_policy
        sizes.points = {count: dispatch_time(policy, limits_of(bare), count) for count in NUM_SIZES}
    layers, cache = Curve("layers", "host"), Curve("cache tokens", "host")
    for count in LAYERS[::2]:
        with worker(HostWorker, 1 << 14, MODEL | {"num_hidden_layers": count}, **LIMITS) as bare:
            layers.points[count] = host_time(bare, uniform(SHORT))
    for tokens in CACHE_TOKENS[::2]:
        with worker(HostWorker, tokens, MODEL | {"num_hidden_layers": 1}, **LIMITS) as bare:
            cache.points[tokens] = host_time(bare, uniform(SHORT))
    return [*curves, layers, cache]


def device_curves(repeats: int) -> tuple[list[Curve], padding.Weights]:
    """Curves of one engine, and the costs of tokens, rows and pairs in it."""
    # The largest batch first: tracing takes sizes of 1 for constants.
    lengths = {("batch", rows): uniform(SHORT, rows) for rows in reversed(BATCHES)}
    lengths |= {("context", tokens): uniform(tokens) for tokens in CONTEXTS}
    lengths |= {("context, mixed lengths", tokens): mixed(tokens) for tokens in MIXED_CONTEXTS}
    graphs: dict[str, Graph] = {}
    sizes = Curve("graphs compiled", "device")
    with worker(ExactWorker, 1 << 18, MODEL, **LIMITS) as exact:
        for (grows, size), rows in lengths.items():
            name = f"{grows} {size}"
            graphs[name] = model_graph(Batch(exact, rows))
            if name == FEW_ROWS:
                sizes.points[len(graphs)] = least({name: graphs[name]}, repeats)[name]
        limits = limits_of(exact)
        for tokens, count, tiles, pairs in PREFILLS:
            graph = waited(padded_graph(exact.model_runner, limits.mixed_size(0, 0, tokens, count, pairs, tiles)))
            graphs[str(graph.size)] = graph
        times = least(graphs, repeats)
        sizes.points[len(graphs)] = least({FEW_ROWS: graphs[FEW_ROWS]}, repeats)[FEW_ROWS]
    curves = [
        Curve(name, "device", {size: times[f"{name} {size}"] for grows, size in sorted(lengths) if grows == name})
        for name in ("batch", "context", "context, mixed lengths")
    ]
    return [*curves, sizes], fit_weights(limits, {name: graph.size for name, graph in graphs.items()}, times)


def fit_weights(limits: StepLimits, sizes: dict[str, StepSize], times: dict[str, float]) -> padding.Weights:
    """Costs of a step, a token, and pairs of decode rows and of chunks, by least squares of the relative error.

    A row of logits is taken by its arithmetic: in decode it never comes without a token.
    """
    row = padding.CPU.row
    parts = []
    for name, size in sizes.items():
        tokens, rows, decode_pairs, chunk_pairs = padding.work(limits, size)
        parts.append(np.array([1, tokens + row * rows, decode_pairs, chunk_pairs]) / times[name])
    (_, token, decode_pair, chunk_pair), _ = nnls(np.array(parts), np.ones(len(parts)))
    return padding.Weights(row, decode_pair / token, chunk_pair / token)


def engine_curve(name: str, engines: dict[int, tuple[int, dict[str, Any]]], repeats: int) -> Curve:
    """A curve whose points need an engine each, of these numbers of cache tokens and model configs."""
    curve = Curve(name, "device")
    for size, (cache_tokens, config) in engines.items():
        with worker(ExactWorker, cache_tokens, MODEL | config, **LIMITS) as exact:
            curve.points[size] = least({name: model_graph(Batch(exact, uniform(SHORT)))}, repeats)[name]
    return curve


def window_curve(repeats: int) -> Curve:
    curve = Curve(f"context, window {WINDOW}", "device")
    window = {"layer_types": ["sliding_attention"] * 5, "sliding_window": WINDOW}
    with worker(ExactWorker, 1 << 18, MODEL | window, **LIMITS) as exact:
        cases = {str(tokens): model_graph(Batch(exact, uniform(tokens))) for tokens in CONTEXTS}
        curve.points = {int(tokens): time for tokens, time in least(cases, repeats).items()}
    return curve


def ratios(curves: list[Curve]) -> dict[int, float]:
    """Time with mixed lengths over time with uniform ones, by mean context."""
    uniform_times, mixed_times = (
        next(curve.points for curve in curves if (curve.grows, curve.side) == (name, "device"))
        for name in ("context", "context, mixed lengths")
    )
    return {context: round(time / uniform_times[context], 2) for context, time in mixed_times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plots", type=Path, help="write the figures into this directory")
    args = parser.parse_args()
    curves = host_curves()
    device, weights = device_curves(args.repeats)
    curves += [
        *device,
        window_curve(args.repeats),
        engine_curve("cache tokens", {tokens: (tokens, {}) for tokens in CACHE_TOKENS}, args.repeats),
        engine_curve("layers", {n: (1 << 14, {"num_hidden_layers": n}) for n in LAYERS}, args.repeats),
    ]
    rows = [curve.row() for curve in curves]
    waste = list(padding.compare([(*padding.DEFAULT, 512, CHAT), (*padding.DEFAULT, 2048, CHAT)]))
    show(rows, False)
    print(f"\nIn tokens: a decode pair {weights.decode_pair:.2f}, a chunk's pair {weights.chunk_pair:.2f}.")
    print("Mixed lengths against uniform ones of the same tokens, device:", ratios(curves), "\n")
    show(waste, False)
    if args.plots:
        from benchmarks.plots import draw_curves

        draw_curves(curves, args.plots)
    if args.json:
        points = [{**row, "points": curve.points} for row, curve in zip(rows, curves, strict=True)]
        print(json.dumps({"curves": points, "weights": vars(weights), "padding": waste}))


if __name__ == "__main__":
    main()
