"""The KV cache's size against vLLM's own worker, on a device that counts its memory."""

import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.utils.mem_utils
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.utils.mem_utils import MemorySnapshot, memory_profiling
from vllm.v1.worker.utils import request_memory

from gpu_runner.device_ops import CudaDeviceOps
from gpu_runner.worker import GPUWorker
from model_runner_base.inputs.adapters.adapters import NO_ADAPTERS
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER


class CountingGpu:
    """A device's memory in bytes, as the driver and torch's allocator count it."""

    total = 80 << 30

    def __init__(self, others: int) -> None:
        self.used = others
        self.allocated = self.reserved = self.peak = 0

    def allocate(self, count: int) -> None:
        self.allocated += count
        self.peak = max(self.peak, self.allocated)
        grown = max(self.allocated, self.reserved) - self.reserved
        self.reserved += grown
        self.used += grown

    def empty_cache(self, device: Any = None) -> None:
        self.used -= self.reserved - self.allocated
        self.reserved = self.allocated

    def reset_peak(self, device: Any = None) -> None:
        self.peak = self.allocated

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Memory functions under their names in torch.cuda, in vLLM's platforms, and for torch's accelerators."""
        return {
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak,
            "mem_get_info": lambda device=None: (self.total - self.used, self.total),
            "get_memory_info": lambda device=None: (self.total - self.used, self.total),
            "memory_reserved": lambda device=None: self.reserved,
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_stats": lambda device=None: {
                "allocated_bytes.all.peak": self.peak,
                "allocated_bytes.all.current": self.allocated,
            },
            "synchronize": lambda device=None: None,
        }


sizes_in_bytes = st.integers(0, 5 << 30)


@settings(deadline=None, max_examples=examples(50))
@given(*[sizes_in_bytes] * 6, st.floats(0.5, 0.93))
def test_kv_cache_gets_what_vllms_worker_would_give_it(
    others: int, weights: int, kept: int, activations: int, early: int, late: int, utilization: float
) -> None:
    """The cache's size is vLLM's, whatever else takes memory. ``early`` and ``late`` are bytes that libraries other
    than torch take after start-up and during the profile."""

    def start(patch: pytest.MonkeyPatch) -> CountingGpu:
        patch.setattr(gc, "collect", lambda: 0)  # Slow, and nothing here is left to it.
        gpu = CountingGpu(others)
        functions = gpu.functions()
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function, raising=False)
            patch.setattr(torch.accelerator, name, function, raising=False)
        no_device = {
            "is_cuda": lambda: False,
            "is_integrated_gpu": lambda index: False,
            "current_device": lambda: "cpu",
            "device_name": "gpu",
        }
        patch.setattr(vllm.utils.mem_utils, "current_platform", SimpleNamespace(**functions, **no_device))
        return gpu

    def load(gpu: CountingGpu) -> None:
        gpu.used += early
        gpu.allocate(weights)

    def profile(gpu: CountingGpu) -> None:
        gpu.allocate(kept)
        gpu.allocate(activations)
        gpu.allocate(-activations)
        gpu.used += late

    cache_config: Any = SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=None)
    with pytest.MonkeyPatch.context() as patch:
        gpu = start(patch)
        snapshot = MemorySnapshot(device="cpu")
        requested = request_memory(snapshot, cache_config)
        load(gpu)
        with memory_profiling(snapshot, weights_memory=weights) as profiled:
            profile(gpu)
        theirs = requested - profiled.non_kv_cache_memory

    with pytest.MonkeyPatch.context() as patch:
        gpu = start(patch)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", lambda: None)
        ops = CudaDeviceOps(torch.device("cpu"))
        runner = SimpleNamespace(
            device_ops=ops,
            profile_run=lambda: ops.peak_memory(lambda: profile(gpu)),
            useful_cache_memory=lambda: math.inf,
            adapters=NO_ADAPTERS,
            encoder=NO_ENCODER,
        )
        worker = object.__new__(GPUWorker)
        worker.cache_config, worker.model_runner = cache_config, runner  # type: ignore[assignment]
        worker.num_local_workers = 1
        patch.setattr(worker, "_shares_host_memory", lambda: False)
        worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))  # type: ignore
        worker.measure_at_start()
        load(gpu)
        assert worker.determine_available_memory() == theirs
