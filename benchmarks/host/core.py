"""Steps a second of a whole engine core on a device that takes no time: vLLM's scheduler and runner, or ours.

    python -m benchmarks.host.core [--json] [--steps N]

vLLM's own ``EngineCore`` steps them, with its batch queue under asynchronous scheduling; what it hands to the front end
is dropped. All requests decode; prefix caching and statistics are on. Time is the thread's CPU time, in turns of 64
steps after eight that do not count. See step.py for what is a fake, and for the parts of a step.
"""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.worker_base import WorkerBase

from benchmarks.harness.fake_device import CLOCK_NS, VOCAB_SIZE, FakeDeviceRunner
from benchmarks.harness.report import TURN, make_parser, progress, show, steps_in_turns
from benchmarks.harness.runners import (
    LAYERS,
    NUM_BLOCKS,
    SPEC,
    init_groups,
    init_process,
    layered_config,
    length_of,
    make_request,
    make_runner,
)
from benchmarks.host.stock_runner import StockBackend, StockRunner
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.worker import CompilationTimes

COUNTS = (256, 1024)


class CoreWorker(WorkerBase):
    """Methods that an executor calls on a worker, passed on to a runner."""

    def __init__(self, config: VllmConfig, runner: Any) -> None:
        self.vllm_config, self.runner = config, runner
        self.execute_model, self.sample_tokens = runner.execute_model, runner.sample_tokens  # type: ignore[method-assign]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return dict.fromkeys(LAYERS, SPEC)

    def determine_available_memory(self) -> int:
        return NUM_BLOCKS * SPEC.page_size_bytes * len(LAYERS)

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        self.runner.initialize_kv_cache(configs[0])

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:  # type: ignore[override]
        return CompilationTimes(0.0, 0.0)

    def shutdown(self) -> None:
        pass


class CoreExecutor(UniProcExecutor):
    """Executor whose outputs are ready at once, so no thread waits for them."""

    make_runner: Callable[[VllmConfig], Any]

    def _init_executor(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            worker = CoreWorker(self.vllm_config, self.make_runner(self.vllm_config))  # type: ignore[call-arg]
        self.driver_worker = worker  # type: ignore[assignment]
        self.async_output_thread = None


class Core:
    """An engine core with ``count`` requests that decode; the device replays its results."""

    def __init__(self, config: VllmConfig, make_runner: Callable[[VllmConfig], Any], count: int) -> None:
        executor = type("Executor", (CoreExecutor,), {"make_runner": staticmethod(make_runner)})
        self.core = EngineCore(config, executor, log_stats=True)
        runner = self.core.model_executor.driver_worker.runner  # type: ignore[attr-defined]
        for number in range(count):
            prompt = [(number * 7 + index * index) % VOCAB_SIZE for index in range(length_of(number))]
            self.core.add_request(make_request(str(number), prompt, 2500))
        scheduler: Any = self.core.scheduler
        while min(request.num_output_tokens for request in scheduler.requests.values()) < 8:
            self.step()
        if isinstance(runner, FakeDeviceRunner):
            runner.make_buffers(count, 0)
        runner.fake_device.replay()
        for _ in range(20):
            self.step()

    def step(self) -> int:
        """Runs one step; returns nanoseconds of this thread's CPU time."""
        start = time.thread_time_ns()
        _, is_executed = self.core.step_fn()
        self.core.post_step(is_executed)
        return time.thread_time_ns() - start - CLOCK_NS


def measure(is_async: bool, count: int, num_steps: int) -> dict[str, float]:
    """Steps a second of both cores, and their ratio."""
    init_groups()
    config = layered_config(is_async, StockBackend)
    config.scheduler_config.scheduler_cls = None  # type: ignore[assignment]  # vLLM's own.
    cores = {
        "stock": Core(config, StockRunner, count),
        "ours": Core(layered_config(is_async, PagedAttentionBackend), make_runner, count),
    }
    times = steps_in_turns({name: core.step for name, core in cores.items()}, num_steps)
    for core in cores.values():
        core.core.shutdown()
    rates = {f"{name}_steps_per_s": round(1e9 / fmean(each), 1) for name, each in times.items()}
    return rates | {"ratio": round(sum(times["stock"]) / sum(times["ours"]), 2)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=256, help="timed steps a case")
    args = parser.parse_args()
    counts, num_steps = ((16,), TURN) if args.quick else (COUNTS, args.steps)
    init_process()
    cases = [(is_async, count) for is_async in (False, True) for count in counts]
    rows = [
        {"requests": count, "async": is_async, **measure(is_async, count, num_steps)}
        for is_async, count in progress(cases, "engine cores")
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
