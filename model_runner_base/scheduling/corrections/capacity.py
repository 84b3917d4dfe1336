"""The longest request that a KV cache can hold."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig


def longest_request(scheduler: Any, config: KVCacheConfig, num_blocks: int) -> int:
    """Tokens, at most ``max_model_len``, of the longest request that has the whole cache of ``num_blocks``.

    Its last token is sampled and never computed. Drafts behind it are, and have blocks.
    """
    num_beside = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
    low, high = 0, scheduler.max_model_len
    while low < high:
        length = (low + high + 1) // 2
        num_computed = min(length - 1 + num_beside, scheduler.max_model_len)
        # One block is the null block, which no request gets.
        if _num_blocks(config, num_computed, scheduler) < num_blocks:
            low = length
        else:
            high = length - 1
    return low


def _num_blocks(config: KVCacheConfig, num_tokens: int, scheduler: Any) -> int:
    """Blocks that a request of so many computed tokens holds at a time, over all groups."""
    return sum(_num_group_blocks(group.kv_cache_spec, num_tokens, scheduler) for group in config.kv_cache_groups)


def _num_group_blocks(spec: Any, num_tokens: int, scheduler: Any) -> int:
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)  # Layers of one type, and of several sizes.
    if isinstance(spec, FullAttentionSpec):
        return -(-num_tokens // spec.block_size)
    kept = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if kept is None:
        return spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes
    # vLLM frees what lies behind a window before it gives a step's tokens their blocks.
    step = scheduler.scheduler_config.max_num_batched_tokens
    return min(-(-num_tokens // spec.block_size), -(-(kept - 1 + step) // spec.block_size) + 1)
