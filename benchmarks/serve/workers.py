"""Workers of a server's engine: vLLM's runner or ours, on the device that takes no time."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from benchmarks.harness.runners import LAYERS, Layer, init_groups
from benchmarks.harness.runners import make_runner as make_our_runner
from benchmarks.host.core import CoreWorker
from benchmarks.host.stock_runner import StockBackend, StockRunner
from model_runner_base.attention.paged import PagedAttentionBackend


class ServedWorker(CoreWorker):
    """Worker of a server's engine; its device repeats the results of steps of the same shapes from the start."""

    backend: type[Any]
    make_runner: Callable[[VllmConfig], Any]

    def __init__(self, vllm_config: VllmConfig, **_: Any) -> None:
        torch.set_num_threads(1)
        init_groups()
        context = vllm_config.compilation_config.static_forward_context
        context.update({name: Layer(self.backend) for name in LAYERS})
        super().__init__(vllm_config, self.make_runner(vllm_config))  # type: ignore[call-arg]
        self.runner.fake_device.replay()

    def init_device(self) -> None:
        pass

    load_model = reset_mm_cache = init_device  # type: ignore[assignment]

    def initialize_from_config(self, config: KVCacheConfig) -> None:  # type: ignore[override]
        self.runner.initialize_kv_cache(config)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)


class StockWorker(ServedWorker):
    """Worker of vLLM's runner."""

    backend, make_runner = StockBackend, staticmethod(StockRunner)


class OurWorker(ServedWorker):
    """Worker of our runner."""

    backend, make_runner = PagedAttentionBackend, staticmethod(make_our_runner)
