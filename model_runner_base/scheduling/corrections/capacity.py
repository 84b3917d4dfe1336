"""The longest request that a KV cache can hold."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from model_runner_base.scheduling.state_group import StateSpec


def longest_request(scheduler: Any, config: KVCacheConfig, num_blocks: int) -> int:
    """Length of the longest request that the whole cache of ``num_blocks`` can hold: at most ``max_model_len`` tokens.

    The last token is sampled but never computed, unless the model pools. Drafts after it are computed, so they need
    blocks.
    """
    num_sampled = num_sampled_tokens(scheduler)
    num_ahead = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
    low, high = 0, scheduler.max_model_len
    while low < high:
        length = (low + high + 1) // 2
        num_computed = min(length - num_sampled + num_ahead, scheduler.max_model_len)
        # One block is the null block, which no request gets.
        if _num_blocks(config, num_computed, scheduler) < num_blocks:
            low = length
        else:
            high = length - 1
    return low


def num_sampled_tokens(scheduler: Any) -> int:
    """Number of tokens that a request needs a place for after its prompt: one, or none in a pooling model."""
    return 0 if scheduler.vllm_config.model_config.runner_type == "pooling" else 1


def _num_blocks(config: KVCacheConfig, num_tokens: int, scheduler: Any) -> int:
    """Number of blocks, over all groups, that a request with ``num_tokens`` computed tokens holds at a time."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    # States of recurrent layers are not blocks of the cache.
    return sum(_num_group_blocks(spec, num_tokens, scheduler) for spec in specs if not isinstance(spec, StateSpec))


def _num_group_blocks(spec: Any, num_tokens: int, scheduler: Any) -> int:
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)  # Layers of one type but several sizes.
    if isinstance(spec, FullAttentionSpec):
        return -(-num_tokens // spec.block_size)
    kept = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if kept is None:
        return spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes
    # vLLM frees the blocks before a window, and then allocates those of a step's tokens.
    step = scheduler.scheduler_config.max_num_batched_tokens
    return min(-(-num_tokens // spec.block_size), -(-(kept - 1 + step) // spec.block_size) + 1)
