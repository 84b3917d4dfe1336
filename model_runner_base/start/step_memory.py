"""Estimate of the memory that the largest step needs in addition to weights and KV cache, from its shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import ModelConfig

from model_runner_base.inputs.embeddings import embeddings_memory
from model_runner_base.layers.fused_moe import GATHER_COST, MAX_DENSE_TOKENS
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.vllm_compat.types.kv_cache import is_of_encoder, is_of_latents, larger_head, layer_caches


def estimate_step_memory(
    sizes: Sequence[StepSize],
    limits: StepLimits,
    specs: Mapping[str, Any],
    model_config: ModelConfig,
    gathers_cache: bool = True,
) -> int:
    """An upper estimate in bytes of one layer's temporaries and the logits, over all sizes; 0 if there are none.

    ``specs`` are what ``get_kv_cache_spec`` returns; ``limits`` are those that the sizes were made with.

    Counted in float32: the gathered KV tiles and a transposed copy of them, attention scores and their exponentials,
    the pairs' partial outputs, a few hidden states and an MLP's two inner activations, what experts gather and compute;
    logits, eight more arrays of their shape that a sampler with top-p makes, and the token counts that penalties keep;
    the pool of prompt embeddings, where they are enabled; queries and outputs of latent attention. A pooling model has
    rows of hidden states for logits.
    ``gathers_cache`` is False where attention is a kernel, which makes neither tiles nor scores outside of itself.
    """
    hidden = model_config.get_hidden_size()
    inner = _largest(model_config, "intermediate_size") or 4 * hidden
    heads = model_config.model_arch_config.total_num_attention_heads
    width = model_config.get_vocab_size() if limits.decodes else hidden
    shapes = _cache_shapes(specs, limits, model_config)
    if not sizes:
        return 0
    worst = 0
    for size in sizes:
        step = size.num_tokens * (6 * hidden + 2 * inner) + 10 * size.num_logits * width
        step += _experts(model_config, size.num_tokens)
        pairs = limits.named(size)
        worst = max(worst, 4 * step)
        for num_kv_heads, head_size, num_halves, is_cross in shapes:
            # A layer that keeps one row a token, of latents, has queries and outputs as long as the row.
            attention = 2 * size.num_tokens * heads * head_size if num_halves == 1 else 0
            counts = limits.cross_pairs(size) if is_cross else pairs
            decode_query = max(limits.decode.query, limits.pass_tokens)  # A pass of drafting may take more of a row.
            for query, keys, count in (
                (decode_query, limits.decode.keys, counts["decode_pairs"]),
                (limits.chunk.query, limits.chunk.keys, counts["chunk_pairs"]),
            ):
                gathered = 2 * keys * num_halves * num_kv_heads * head_size
                scores = 2 * query * heads * keys
                partial = 2 * query * heads * head_size
                attention += count * (partial + (gathered + scores if gathers_cache else keys))
            worst = max(worst, 4 * (step + attention))
    return worst + embeddings_memory(model_config, limits.max_num_tokens)


def _cache_shapes(
    specs: Mapping[str, Any], limits: StepLimits, model_config: ModelConfig
) -> set[tuple[int, int, int, bool]]:
    """KV heads, head size and number of halves (keys and values; latents have one) of each different layer, and
    whether its keys are an encoder's.

    Where requests do not decode, layers may have no spec: they attend to the step's own keys, in a scratch cache.
    """
    shapes = {
        (layer.num_kv_heads, larger_head(layer.spec), 1 if is_of_latents(layer.spec) else 2, is_of_encoder(layer.spec))
        for layer in layer_caches(specs).values()
    }
    if shapes or limits.decodes:
        return shapes
    return {(model_config.get_total_num_kv_heads(), model_config.get_head_size(), 2, False)}


def _experts(model_config: ModelConfig, num_tokens: int) -> int:
    """Numbers that a mixture-of-experts layer holds at a time, in the costlier of its ways (layers/fused_moe.py)."""
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
    """Size from the model's own config, the largest one if each layer has its own; 0 if there is none."""
    value = getattr(model_config.hf_text_config, name, None) or 0
    return max(value) if isinstance(value, list | tuple) else value
