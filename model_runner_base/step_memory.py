"""What the largest step needs beside weights and KV cache, from its shapes."""

from collections.abc import Mapping, Sequence

from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from model_runner_base.attention.plan import kv_tile_for
from model_runner_base.graph_policy import GraphSize
from model_runner_base.layers.fused_moe import GATHER_COST, MAX_DENSE_TOKENS


def estimate_step_memory(
    sizes: Sequence[GraphSize],
    specs: Mapping[str, KVCacheSpec],
    model_config: ModelConfig,
    kv_tile_target: int,
    gathers_cache: bool = True,
) -> int:
    """An upper estimate in bytes of one layer's temporaries and the logits, over all sizes; 0 if there are none.

    ``kv_tile_target`` is the runner's ``KV_TILE``, which the sizes were made with.

    Counted in float32: the gathered KV tiles and a transposed copy of them, attention scores and their exponentials,
    the pairs' partial outputs, a few hidden states and an MLP's two inner activations, what experts gather and compute;
    logits, eight more arrays of their shape that a sampler with top-p makes, and the token counts that penalties keep.
    ``gathers_cache`` is False where attention is a kernel, which makes neither tiles nor scores outside of itself.
    """
    hidden = model_config.get_hidden_size()
    inner = _largest(model_config, "intermediate_size") or 4 * hidden
    vocabulary = model_config.get_vocab_size()
    worst = 0
    for size in sizes:
        step = size.num_tokens * (6 * hidden + 2 * inner) + 10 * size.num_reqs * vocabulary
        step += _experts(model_config, size.num_tokens)
        for spec in specs.values():
            if isinstance(spec, AttentionSpec):
                kv_tile = kv_tile_for(spec.block_size, kv_tile_target)
                heads = model_config.model_arch_config.total_num_attention_heads
                gathered = 2 * kv_tile * 2 * spec.num_kv_heads * spec.head_size
                scores = 2 * size.query_tile * heads * kv_tile
                partial = 2 * size.query_tile * heads * spec.head_size
                pair = partial + (gathered + scores if gathers_cache else kv_tile)
                worst = max(worst, 4 * (step + size.num_pairs * pair))
    return worst


def _experts(model_config: ModelConfig, num_tokens: int) -> int:
    """Numbers that a mixture-of-experts layer holds at a time, the dearer of its ways (layers/fused_moe.py)."""
    num_experts = model_config.get_num_experts()
    if not num_experts:
        return 0
    hidden = model_config.get_hidden_size()
    inner = _largest(model_config, "moe_intermediate_size") or _largest(model_config, "intermediate_size") or 4 * hidden
    row = 2 * hidden + 3 * inner
    if num_tokens <= MAX_DENSE_TOKENS:
        return max(num_experts * num_tokens * row, num_experts // GATHER_COST * 3 * hidden * inner)
    top_k = _largest(model_config, "num_experts_per_tok") or num_experts
    return 2 * num_experts * 3 * hidden * inner + 2 * num_tokens * top_k * row


def _largest(model_config: ModelConfig, name: str) -> int:
    """A size in the model's own config, the largest where it has one a layer; 0 if it has none."""
    value = getattr(model_config.hf_text_config, name, None) or 0
    return max(value) if isinstance(value, list | tuple) else value
