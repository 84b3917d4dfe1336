"""Cost of a graph of a Llama, decode sizes: to make it at start-up, and to launch it.

`runner` makes graphs as the runner does, from the one Dynamo capture of this kind of step; `torch.compile` is plain
torch.compile(backend="openxla", dynamic=False), at the depths of ``--naive``. `once_s` is what the first size costs
besides XLA's time (the capture), `graph_s` each further one (median), `xla_s` XLA's own compile time in it, `ratio` the
two. `launch_us` is the time from a packed host buffer that is ready to the return of the call that launches the graph,
`cpu_us` the thread's CPU time in it, medians; the ways take turns, and each launch is waited for.

    python -m benchmarks.device.graphs [--layers 4 12 32] [--naive 4]
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from vllm.forward_context import override_forward_context

from benchmarks.harness.report import make_parser, progress, show
from benchmarks.harness.workers import ExactWorker, worker

Launch = Callable[..., Any]
ROWS = 8
"""Rows of the step that is launched."""
LIMITS = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 64}


class Graphs:
    """The model's graph of a runner, made in two ways."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.parts = runner, runner.parts
        self.forward = runner.parts.graph.forward

    def step(self, count: int) -> Any:
        """A decode step of ``count`` rows of padding."""
        return self.parts.graph.pad(self.parts.layout.limits.decode_size(count, count))

    def send(self, step: Any) -> list[Any]:
        """Sends the step's buffer; returns what the graph takes after its size."""
        step.send()
        return [step.on_device, step.entries_on_device, *self.parts.rows.tensors, *self.parts.components.tensors]

    def by_runner(self, count: int) -> Launch:
        self.parts.bind_kv_caches()
        step = self.step(count)
        self.forward(step.size, *self.send(step))[0].cpu()
        return partial(self.forward, step.size)

    def by_torch_compile(self, count: int) -> Launch:
        """Compiles as a user would write it, on caches of its own, since nothing is donated to it."""
        step, state = self.step(count), self.forward.state
        kept = list(state)
        for index, cache in enumerate(kept):
            state[index] = self.runner.device_ops.zeros(cache.shape, cache.dtype)
        self.parts.bind_kv_caches()
        for index, cache in enumerate(kept):
            state[index] = cache
        compiled = torch.compile(
            lambda *args: self.forward.function(step.size, *args), backend="openxla", dynamic=False
        )
        compiled(*self.send(step))[0].cpu()
        return compiled

    def launch_times(self, ways: dict[str, Launch], num_launches: int) -> dict[str, dict[str, float]]:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        step = self.step(ROWS)
        for _ in range(5 + num_launches):
            for name, launch in ways.items():
                start, cpu_start = time.perf_counter(), time.thread_time()
                outputs = launch(*self.send(step))
                cpu, wall = time.thread_time() - cpu_start, time.perf_counter() - start
                outputs[0].cpu()
                xm.wait_device_ops()
                times[name].append((wall * 1e6, cpu * 1e6))
        medians = {name: [median(part) for part in zip(*pairs[5:], strict=True)] for name, pairs in times.items()}
        return {name: {"launch_us": wall, "cpu_us": cpu} for name, (wall, cpu) in medians.items()}


def make_times(make: Callable[[int], Launch], counts: range) -> dict[str, float]:
    """Seconds to make the graphs of so many rows each, the first of which is not like the others."""
    costs = []
    for count in counts:
        before, start = _compile_time(), time.perf_counter()
        make(count)
        costs.append((time.perf_counter() - start, _compile_time() - before))
    (first, first_xla), *further = costs
    seconds, xla = (median(part) for part in zip(*further, strict=True))
    return {"once_s": first - first_xla, "graph_s": seconds, "xla_s": xla, "ratio": seconds / xla}


def _compile_time() -> float:
    compiled = met.metric_data("CompileTime")
    return compiled[1] / 1e9 if compiled else 0.0


def measure(num_layers: int, with_naive: bool, num_graphs: int, num_launches: int) -> list[dict[str, Any]]:
    """Rows of the table for one depth."""
    with worker(ExactWorker, 1 << 14, {"num_hidden_layers": num_layers}, **LIMITS) as exact:
        graphs = Graphs(exact.model_runner)
        with torch.no_grad(), override_forward_context(graphs.parts.forward_context):
            made = {"runner": make_times(graphs.by_runner, range(30, 31 + num_graphs))}
            ways = {"runner": graphs.by_runner(ROWS)}
            if with_naive:
                made["torch.compile"] = make_times(graphs.by_torch_compile, range(40, 43))
                ways["torch.compile"] = graphs.by_torch_compile(ROWS)
            launches = graphs.launch_times(ways, num_launches)
    return [{"layers": num_layers, "way": way, **made[way], **launches[way]} for way in ways]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32])
    parser.add_argument("--naive", type=int, nargs="*", default=[4], help="depths to run torch.compile at, slowly")
    args = parser.parse_args()
    depths, counts = ([1], (1, 5)) if args.quick else (args.layers, (5, 200))
    rows = []
    for num_layers in progress(depths, "depths"):
        rows += measure(num_layers, num_layers in args.naive, *counts)
    show(rows, args.json)


if __name__ == "__main__":
    main()
