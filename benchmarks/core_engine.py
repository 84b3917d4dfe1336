"""vLLM's engine core around a runner on the device that takes no time, for ``host_core``."""

from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from benchmarks.fake_device import VOCAB_SIZE, FakeDeviceRunner
from benchmarks.host_engine import LAYERS, MAX_MODEL_LEN, MAX_NUM_SEQS, SPEC, make_config, make_request
from benchmarks.stock_runner import StockBackend, StockRunner
from model_runner_base.attention.paged import PagedAttentionBackend

NUM_BLOCKS = MAX_NUM_SEQS * MAX_MODEL_LEN // SPEC.block_size // 2 + 1


class CoreWorker:
    """Methods that an executor calls on a worker, passed on to a runner."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.execute_model, self.sample_tokens = runner.execute_model, runner.sample_tokens

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return dict.fromkeys(LAYERS, SPEC)

    def determine_available_memory(self) -> int:
        return NUM_BLOCKS * SPEC.page_size_bytes * len(LAYERS)

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        self.runner.initialize_kv_cache(configs[0])

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        pass

    compile_or_warm_up_model = shutdown = lambda self: None


class CoreExecutor(UniProcExecutor):
    """Executor whose outputs are ready at once, so no thread waits for them."""

    make_runner: Any

    def _init_executor(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.driver_worker = CoreWorker(self.make_runner(self.vllm_config))  # type: ignore[assignment]
        self.async_output_thread = None


class Core:
    """An engine core that steps."""

    def __init__(self, config: VllmConfig, make_runner: Any) -> None:
        executor = type("Executor", (CoreExecutor,), {"make_runner": staticmethod(make_runner)})
        self.core = EngineCore(config, executor, log_stats=True)
        self.runner = self.core.model_executor.driver_worker.runner

    def start(self, count: int) -> None:
        """Makes ``count`` requests decode, contexts from 50 to 1500 tokens; then the device replays its results."""
        for number in range(count):
            length = 50 + number * 997 % 1451
            prompt = [(number * 7 + index * index) % VOCAB_SIZE for index in range(length)]
            self.core.add_request(make_request(str(number), prompt, 2500))
        scheduler: Any = self.core.scheduler
        requests = scheduler.requests.values()
        while min(request.num_output_tokens for request in requests) < 8:
            self.step()
        if isinstance(self.runner, FakeDeviceRunner):
            self.runner.make_buffers(count, 0)
        self.runner.fake_device.replay()
        for _ in range(20):
            self.step()

    def step(self) -> None:
        _, is_executed = self.core.step_fn()
        self.core.post_step(is_executed)


def stock(is_async: bool) -> Core:
    config = make_config(is_async, StockBackend)
    config.scheduler_config.scheduler_cls = None  # type: ignore[assignment]  # vLLM's own.
    return Core(config, StockRunner)


def ours(is_async: bool) -> Core:
    def make_runner(config: VllmConfig) -> FakeDeviceRunner:
        runner = FakeDeviceRunner(config, torch.device("cpu"))
        runner.load_model()
        return runner

    return Core(make_config(is_async, PagedAttentionBackend), make_runner)
