"""What the largest step needs beside weights and KV cache, from its shapes."""

from collections.abc import Mapping, Sequence

from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from model_runner_base.attention.plan import kv_tile_for
from model_runner_base.graph_policy import GraphSize


def estimate_step_memory(
    sizes: Sequence[GraphSize], specs: Mapping[str, KVCacheSpec], model_config: ModelConfig
) -> int:
    """An upper estimate in bytes of one layer's temporaries and the logits, over all sizes; 0 if there are none.

    Counted in float32: the gathered KV tiles and a transposed copy of them, attention scores and their exponentials,
    the pairs' partial outputs, a few hidden states and an MLP's two inner activations; logits, eight more arrays of
    their shape that a sampler with top-p makes, and the token counts that penalties keep.
    """
    hidden = model_config.get_hidden_size()
    inner = getattr(model_config.hf_text_config, "intermediate_size", None) or 4 * hidden
    vocabulary = model_config.get_vocab_size()
    worst = 0
    for size in sizes:
        step = size.num_tokens * (6 * hidden + 2 * inner) + 10 * size.num_reqs * vocabulary
        for spec in specs.values():
            if isinstance(spec, AttentionSpec):
                kv_tile = kv_tile_for(spec.block_size)
                heads = model_config.model_arch_config.total_num_attention_heads
                gathered = 2 * kv_tile * 2 * spec.num_kv_heads * spec.head_size
                scores = 2 * size.query_tile * heads * kv_tile
                partial = 2 * size.query_tile * heads * spec.head_size
                worst = max(worst, 4 * (step + size.num_pairs * (gathered + scores + partial)))
    return worst
