"""Time to launch a step's graph, and what the host can do while it runs: a Llama of 32 layers, hidden size 64.

`dispatch`: from a packed host buffer that is ready to the return of the call that launches the graph, in microseconds:
median and fastest of many, and the median of the calling thread's CPU time. The ways take turns, and each is waited for
before the next: plain torch.compile(backend="openxla"), the bridge's own callable for the captured graph, and the
runner's call. `ratio`: CPU time of the first against it.

`overlap`: a mixed step of many tokens, in milliseconds: when its launch returns and when its result can be read; the
launch of the next while it runs; then a loop in which the host works while the graph runs against one in which it waits
for each graph first.

    python -m benchmarks.dispatch
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch_xla._dynamo.dynamo_bridge import extract_internal
from vllm import LLM
from vllm.forward_context import override_forward_context

from benchmarks.graphs import arguments
from benchmarks.models import random_llama
from benchmarks.report import parse, show_tables
from model_runner_base import StepKind, StepSize
from model_runner_base.testing.engine import runner_of

LAYERS = 32
TOKENS = 512
"""Tokens of the mixed step."""


class Launcher:
    """A runner's model graph at one size on padding, launched in several ways."""

    def __init__(self, runner: Any, size: StepSize) -> None:
        self.runner = runner
        self.size = size
        self.step = runner.parts.graph.pad(size)

    def arguments(self) -> list[Any]:
        """Arguments that the graph is run with; the buffer is sent anew."""
        self.step.send()
        return arguments(self.runner, self.step)

    def ours(self) -> Any:
        return self.runner.parts.graph.forward(self.size, *self.arguments())

    def through_bridge(self) -> Callable[[], Any]:
        """A launch of the captured graph, by the function that the bridge makes of it."""
        forward = self.runner.parts.graph.forward
        (capture,) = forward._captures[(self.size.kind,)]
        state = forward.state

        def graph_inputs() -> list[Any]:
            tensors = self.arguments()
            values = {"int": self.size.dims, "tensor": tensors, "state": state}
            return [
                source.constant
                if source.kind == "constant"
                else tensors[source.place].shape[source.dim]
                if source.kind == "size"
                else values[source.kind][source.place]
                for source in capture._sources
            ]

        capture._graph.xla_args = graph_inputs()
        compiled = extract_internal(capture._graph)
        retired = []

        def launch() -> Any:
            outputs = compiled(*graph_inputs())
            retired.append(state.copy())
            del retired[:-3]
            for index in capture.state_order:
                state[index] = outputs.pop(0)
            return outputs

        return launch

    def through_torch_compile(self) -> Callable[[], Any]:
        """A plain call of torch.compile, as a user would write it, on caches of its own, since nothing is donated."""
        forward, parts = self.runner.parts.graph.forward, self.runner.parts
        kept = forward.state.copy()
        forward.state[:] = [self.runner.device_ops.zeros(cache.shape, cache.dtype) for cache in kept]
        parts.bind_kv_caches()  # For good: the other ways find theirs in the state.
        forward.state[:] = kept
        compiled = torch.compile(lambda *args: forward.function(self.size, *args), backend="openxla", dynamic=False)
        return lambda: compiled(*self.arguments())


def time_launches(ways: dict[str, Callable[[], Any]], count: int) -> dict[str, list[tuple[float, float]]]:
    """Microseconds until each launch returned, and of the thread's CPU time in it; the ways take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for index in range(count + 5):
        for name, launch in ways.items():
            start, cpu_start = time.perf_counter(), time.thread_time()
            outputs = launch()
            cpu, wall = time.thread_time() - cpu_start, time.perf_counter() - start
            outputs[0].cpu()
            xm.wait_device_ops()
            if index >= 5:
                times[name].append((wall * 1e6, cpu * 1e6))
    return times


def work(seconds: float) -> None:
    """Does host work: Python that computes."""
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        pass


def measure_overlap(launch: Callable[[], Any], count: int) -> dict[str, float]:
    """Milliseconds of launches, results and steps, medians of ``count``."""
    samples: dict[str, list[float]] = {}

    def note(name: str, start: float) -> None:
        samples.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    for _ in range(count):
        start = time.perf_counter()
        outputs = launch()
        note("launch returns", start)
        outputs[0].cpu()
        note("result read", start)
        first = launch()
        start = time.perf_counter()
        second = launch()
        note("next launch returns, while one runs", start)
        first[0].cpu(), second[0].cpu()
    host = statistics.median(samples["result read"]) / 2e3
    for _ in range(count):
        start = time.perf_counter()
        launch()[0].cpu()
        work(host)
        note("a step, host after graph", start)
        start = time.perf_counter()
        outputs = launch()
        work(host)
        outputs[0].cpu()
        note("a step, host during graph", start)
    return {"host work": host * 1e3, **{name: statistics.median(values) for name, values in samples.items()}}


def main() -> None:
    args = parse(__doc__)
    sizes = {
        "num_seqs_buckets": [1],
        "num_batched_tokens_buckets": [TOKENS],
        "context_length_buckets": [256],
        "warm_up": "full",
    }
    with random_llama(LAYERS) as model:
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_num_batched_tokens=TOKENS,
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            additional_config={"neuron_config": sizes},
        )
    runner = runner_of(llm)
    decode, mixed = (
        next(size for size in order(runner.graph_policy.sizes) if size.kind == kind)
        for order, kind in ((iter, StepKind.DECODE), (reversed, StepKind.MIXED))
    )
    with torch.no_grad(), override_forward_context(runner.parts.forward_context):
        launcher = Launcher(runner, decode)
        ways = {
            "torch.compile": launcher.through_torch_compile(),
            "bridge's callable": launcher.through_bridge(),
            "cached-graph call": launcher.ours,
        }
        times = time_launches(ways, 30 * args.repeats)
        overlap = measure_overlap(Launcher(runner, mixed).ours, 3 * args.repeats)
    rows: list[dict[str, object]] = []
    for name, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        rows.append({"dispatch": name, "us": statistics.median(walls), "fastest_us": min(walls)})
        rows[-1] |= {"cpu_us": statistics.median(cpus)}
        rows[-1] |= {"ratio": rows[0]["cpu_us"] / rows[-1]["cpu_us"]}  # type: ignore[operator]
    show_tables({"dispatch": rows, "overlap": [{"overlap": name, "ms": ms} for name, ms in overlap.items()]}, args.json)


if __name__ == "__main__":
    main()
