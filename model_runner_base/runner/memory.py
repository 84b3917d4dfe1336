"""Memory of the device and of the host: its measurement, the KV cache's share of it, and what the log says."""

import gc
from types import TracebackType

from torch import nn
from vllm.config import VllmConfig
from vllm.utils.mem_constants import GiB_bytes

from model_runner_base.device_ops import DeviceOps, MemoryInfo
from model_runner_base.vllm_compat.probes.config import asked_memory_share
from model_runner_base.vllm_compat.types.kv_cache import (
    KVCacheConfig,
    KVCacheSpec,
    bytes_for_requests,
    held_requests,
)
from model_runner_base.vllm_compat.types.kv_connector import OFFLOADING, connector_configs


class DeviceMemoryProfiler:
    """Measures the bytes of device memory that are still in use after a block of code.

    >>> with DeviceMemoryProfiler(device_ops) as profiler:
    ...     model = load()
    >>> profiler.consumed_memory
    """

    def __init__(self, device_ops: DeviceOps) -> None:
        self.device_ops = device_ops
        self.initial_memory = 0
        self.consumed_memory = 0

    def current_memory_usage(self) -> int:
        info = self.device_ops.memory_info()
        return info.total - info.free

    def __enter__(self) -> "DeviceMemoryProfiler":
        gc.collect()
        self.device_ops.synchronize()
        self.initial_memory = self.current_memory_usage()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.collect()
        self.device_ops.synchronize()
        # Of host memory, other processes may have freed more.
        self.consumed_memory = max(0, self.current_memory_usage() - self.initial_memory)


def offloaded_memory(vllm_config: VllmConfig) -> int:
    """Bytes of the host's memory that vLLM's offloading connector takes for this rank's blocks."""
    if vllm_config.kv_transfer_config is None:
        return 0
    sizes = [
        int(config.kv_connector_extra_config.get("cpu_bytes_to_use", 0))  # That of all ranks.
        for config in connector_configs(vllm_config.kv_transfer_config)
        if config.kv_connector == OFFLOADING
    ]
    return sum(sizes) // vllm_config.parallel_config.world_size


KEPT = 2
"""How many times the running requests fit a cache in the host's memory: what they leave keeps prefixes of ended ones.
"""

MOST = 0.9
"""Largest share of what the step leaves free that the cache takes without a setting."""


def weights_memory(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers; shared ones count once."""
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def host_cache_memory(
    vllm_config: VllmConfig,
    specs: dict[str, KVCacheSpec],
    memory: MemoryInfo,
    weights: int,
    needed: int,
    default_share: float,
    offloaded: int = 0,
) -> int:
    """Bytes of a worker's KV cache in the host's memory; raises ValueError if they do not hold one request.

    Args:
        memory: this worker's part of the host's memory. The weights are no part of what is free.
        needed: bytes of the step, and of what else is allocated in addition to weights and KV cache.
        default_share: share of what the step leaves free, if the user set no ``gpu_memory_utilization``.
        offloaded: bytes for blocks that are kept on the host in addition to the KV cache.
    """
    taken = needed + offloaded
    left, share = memory.free - taken, asked_memory_share(vllm_config.cache_config)
    if share is None:
        # One request of the longest length, if it fits, is served without a setting.
        found = max(left * default_share, min(left * MOST, bytes_for_requests(vllm_config, specs, 1)))
    else:
        found = min(left, memory.total * share - weights - taken)
    most = KEPT * bytes_for_requests(vllm_config, specs, vllm_config.scheduler_config.max_num_seqs)
    available = int(min(found, most) if specs else found)
    _check_one_fits(vllm_config, specs, memory, needed, offloaded, available)
    return available


def _check_one_fits(
    vllm_config: VllmConfig,
    specs: dict[str, KVCacheSpec],
    memory: MemoryInfo,
    needed: int,
    offloaded: int,
    available: int,
) -> None:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_fitted = model.original_max_model_len == -1  # vLLM lowers the length to what fits.
    request = 1 if is_fitted or cache.num_gpu_blocks_override else bytes_for_requests(vllm_config, specs, 1)
    if available < max(1, request):
        what = f"; a request of max_model_len={model.max_model_len} takes {request / GiB_bytes:.2f} GiB"
        remedy = "set kv_cache_memory_bytes" if asked_memory_share(cache) is None else "raise gpu_memory_utilization"
        on_host = ""
        if offloaded:
            on_host = f", {offloaded / GiB_bytes:.2f} GiB for blocks on the host"
            remedy = f"lower kv_offloading_size, {remedy}"
        raise ValueError(
            f"{max(0, available) / GiB_bytes:.2f} GiB are left for the KV cache: {memory.free / GiB_bytes:.2f} GiB are "
            f"free for a worker, and {needed / GiB_bytes:.2f} GiB are for the largest step and recurrent states"
            f"{on_host}{what * (request > 1)}: {remedy}, lower max_model_len, max_num_batched_tokens or max_num_seqs, "
            "or free memory of other processes"
        )


def memory_line(vllm_config: VllmConfig, config: KVCacheConfig, weights: int, step: int | None, states: int) -> str:
    """Line of the log with the uses of a worker's memory; ``step`` is None if the engine did not ask for it, as without
    a KV cache."""
    uses = [f"weights {weights / GiB_bytes:.2f} GiB"]
    if step is not None:
        uses.append(f"largest step {step / GiB_bytes:.2f} GiB")
    if states:
        uses.append(f"states of recurrent layers {states / GiB_bytes:.2f} GiB")
    num_bytes, num_requests = held_requests(vllm_config, config)
    if num_bytes:
        length = vllm_config.model_config.max_model_len
        uses.append(
            f"KV cache {num_bytes / GiB_bytes:.2f} GiB for {int(num_requests * length):,} tokens, which are "
            f"{num_requests:.1f} requests of max_model_len={length:,}"
        )
    return f"Memory of a worker: {', '.join(uses)}."
