"""Cost of a graph at start-up against layers and buckets: vLLM's own Llama, hidden size 64, decode sizes.

Each line is one way to come by the model's graph at another size:
- `runner`: as the runner does it, from the one Dynamo capture of this kind of step.
- `lazy trace`: the model run on lazy tensors and compiled. Nothing can do with less than this, so what `runner`
  takes beyond its memory is the runner's own.
- `torch.compile`: plain torch.compile(backend="openxla", dynamic=False).
`once_s` is what the first size costs besides XLA's time (the capture), `bucket_s` each further one (median), `xla_s`
XLA's own compile time in it, `ratio` the two; `first_s` and `last_s` show whether a bucket costs more the more there
are.
`mb` is the growth of the process's resident memory a graph.

`together`: seconds and CPU seconds of so many graphs one after the other, and side by side as a start does it.

    python -m benchmarks.warmup [--layers 4 12 32] [--naive 4 12]
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import psutil

from benchmarks.models import random_llama
from benchmarks.report import make_parser, show_tables

BUCKETS = 5
TOGETHER = 4


class Growth:
    """Seconds, CPU seconds, XLA's seconds and resident megabytes that a block of code took."""

    def __enter__(self) -> "Growth":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._memory, self._clocks = self._resident(), self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu, self.xla = (b - a for a, b in zip(self._clocks, self._now(), strict=True))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.megabytes = self._resident() - self._memory

    def _now(self) -> tuple[float, ...]:
        import torch_xla.debug.metrics as met

        cpu = psutil.Process().cpu_times()
        compiled = met.metric_data("CompileTime")
        xla = compiled[1] / 1e9 if compiled else 0.0
        return time.perf_counter(), cpu.user + cpu.system, xla

    def _resident(self) -> float:
        return psutil.Process().memory_info().rss / 2**20


def measure(num_layers: int, with_naive: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of one depth. They are measured in a process of its own, so that memory that others gave back is not
    used again."""
    import torch
    import torch_xla
    from torch_xla import _XLAC
    from vllm import LLM
    from vllm.forward_context import override_forward_context

    from benchmarks.graphs import arguments
    from model_runner_base.testing.engine import runner_of

    with random_llama(num_layers) as model:
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=64,
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            additional_config={
                "neuron_config": {"num_seqs_buckets": [64], "num_batched_tokens_buckets": [64], "warm_up": "full"}
            },
        )
    runner = runner_of(llm)

    parts, limits = runner.parts, runner.parts.layout.limits
    run_model, state = parts.graph.forward.function, parts.graph.forward.state

    def inputs(count: int) -> list[Any]:
        """A decode step of ``count`` rows of padding."""
        step = runner.parts.graph.pad(limits.decode_size(count, count))
        return [step.size, *arguments(runner, step)]

    forward = runner.graph_policy.wrap(run_model, state)

    def by_runner(count: int) -> None:
        parts.bind_kv_caches()
        forward(*inputs(count))[0].cpu()

    # The other ways update caches of their own, since nothing is donated to them.
    caches = [runner.device_ops.zeros(cache.shape, cache.dtype) for cache in state]

    def bind_own() -> None:
        kept, state[:] = state.copy(), caches
        parts.bind_kv_caches()
        state[:] = kept

    def by_lazy_trace(count: int) -> None:
        bind_own()
        outputs = run_model(*inputs(count))
        _XLAC._xla_warm_up_cache([*caches, *outputs], [])
        del outputs
        _XLAC._clear_pending_irs(str(torch_xla.device()))
        caches[:] = [runner.device_ops.zeros(cache.shape, cache.dtype) for cache in caches]

    def by_torch_compile(count: int) -> None:
        size, *tensors = inputs(count)
        compiled = torch.compile(lambda *args: run_model(size, *args), backend="openxla", dynamic=False)
        bind_own()
        compiled(*tensors)[0].cpu()

    def line(way: str, run: Callable[[int], None], counts: list[int]) -> dict[str, Any]:
        costs = []
        for count in counts:
            with Growth() as growth:
                run(count)
            costs.append(growth)
        first, further = costs[0], costs[1:]
        seconds = statistics.median(cost.seconds for cost in further)
        xla = statistics.median(cost.xla for cost in further)
        return {
            "layers": num_layers,
            "way": way,
            "graphs": len(further),
            "once_s": first.seconds - first.xla,
            "bucket_s": seconds,
            "xla_s": xla,
            "ratio": statistics.median(cost.seconds / cost.xla for cost in further),
            "first_s": further[0].seconds,
            "last_s": further[-1].seconds,
            "mb": sum(cost.megabytes for cost in further) / len(further),
        }

    with torch.no_grad(), override_forward_context(parts.forward_context):
        counts = range(34, 34 + BUCKETS + 1)
        lines = [line("runner", by_runner, list(counts)), line("lazy trace", by_lazy_trace, [n + 10 for n in counts])]
        if with_naive:
            lines.append(line("torch.compile", by_torch_compile, [n + 24 for n in counts[:3]]))
        with Growth() as serial:
            for count in range(50, 50 + TOGETHER):
                by_runner(count)
        side_by_side = range(50 + TOGETHER, 50 + 2 * TOGETHER)
        with Growth() as ahead:
            list(runner.graph_policy.make_ahead([partial(forward, *inputs(count)) for count in side_by_side]))
    together = [
        {"layers": num_layers, "together": how, "graphs": TOGETHER, "s": cost.seconds, "cpu_s": cost.cpu}
        for how, cost in (("one by one", serial), ("side by side", ahead))
    ]
    return lines, together


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32])
    parser.add_argument("--naive", type=int, nargs="*", default=[4], help="depths to run torch.compile at, slowly")
    args = parser.parse_args()
    lines, together = [], []
    for num_layers in args.layers:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results = pool.submit(measure, num_layers, num_layers in args.naive).result()
        lines += results[0]
        together += results[1]
    show_tables({"graphs": lines, "together": together}, args.json)


if __name__ == "__main__":
    main()
