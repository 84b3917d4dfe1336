"""Contiguous caches: whether a cache is one, how many lines it has, and how much memory is of use to it."""

from vllm.config import VllmConfig

from model_runner_base.attention.plan import kv_tile_for
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout, KVCacheSpec, cross_length, useful_bytes


def is_contiguous(vllm_config: VllmConfig) -> bool:
    """Whether a block holds a whole request (``block_size=max_model_len``), so that a request has one cache line."""
    block_size = vllm_config.cache_config.block_size
    fits = block_size >= vllm_config.model_config.max_model_len
    return fits and block_size % kv_tile_for(block_size) == 0


def useful_memory(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> float:
    """Bytes of KV cache that can be used: a contiguous cache needs one line for each request, and the null block."""
    # An encoder's output has a length of its own, so its blocks are no cache line.
    has_lines = is_contiguous(vllm_config) and not cross_length(vllm_config)
    lines = vllm_config.scheduler_config.max_num_seqs if has_lines else None
    return useful_bytes(vllm_config, specs, lines)


def num_lines(layout: CacheLayout, vllm_config: VllmConfig) -> int:
    """Number of lines of a contiguous cache, without the null block; 0 where reading all lines would not pay.

    It does not pay if there are more lines than requests, or if a request has a line in each of several groups.
    """
    count = layout.num_blocks - 1
    pays = len(layout.groups) == 1 and count <= vllm_config.scheduler_config.max_num_seqs
    return count if pays and is_contiguous(vllm_config) else 0
