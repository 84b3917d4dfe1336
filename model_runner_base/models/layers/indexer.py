"""vLLM's indexers (sparse attention, DSA) in plain torch: their forwards are replaced on the instances, after loading.

An indexer writes a key of each token to a cache of its own, and leaves what it chose for the tokens in the step's
metadata (attention/choice.py): for its own layer, and for the layers after it that have none.

vLLM plans that cache for its own kernels, in 8 bits with a scale. Here it has keys in the model's dtype, on the block
tables of the latents. It names the latents' backend, so that both are in one attention group.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from model_runner_base.attention.cache_format import AS_THEY_ARE, CacheFormat, Numbers
from model_runner_base.attention.choice import Chooser, SparseMetadata
from model_runner_base.attention.latent import LatentFormat
from model_runner_base.attention.sparse import SparseLatentBackend
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.probes.indexers import indexers

IS_FUSED = "wk_weights_proj"
"""Projection that makes keys and weights in some releases of vLLM; ``wk`` and ``weights_proj`` in others."""


class IndexKeys(NamedTuple):
    """Form of an indexer's cache, as attention layers have it in their ``impl``."""

    cache_format: CacheFormat
    numbers: Numbers = AS_THEY_ARE


def use_plain_indexers(model: nn.Module) -> None:
    """Makes every indexer of a loaded model run in plain torch.

    Raises UnsupportedConfigError for an indexer whose projections are quantised.
    """
    for name, indexer, rotates_last in indexers(model):
        _check(name, indexer)
        cache = indexer.k_cache
        cache.head_dim, cache.dtype = indexer.head_dim, indexer.wq_b.weight.dtype
        cache.impl = IndexKeys(LatentFormat(1, indexer.head_dim))
        cache.get_attn_backend = _backend
        indexer.chooser = Chooser(indexer.topk_tokens)
        indexer.rotates_last = rotates_last
        indexer.forward = MethodType(forward, indexer)


def _check(name: str, indexer: nn.Module) -> None:
    for part, layer in indexer.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not isinstance(method, UnquantizedLinearMethod):
            raise UnsupportedConfigError(
                f"{name}.{part}: an indexer that is quantised ({type(method).__name__}) is not supported in plain "
                "torch: use the checkpoint that the quantised one was made from"
            )


def _backend() -> type[SparseLatentBackend]:
    """Backend of the latents, so that both caches are planned as one group."""
    return SparseLatentBackend


def forward(self: Any, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
    """Writes the tokens' keys to the cache, and leaves what it chose for them in the step's metadata.

    ``hidden_states`` [T, hidden]; ``qr`` [T, q_lora_rank], the low-rank queries after their norm.
    """
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:
        return
    step: SparseMetadata = metadata[self.k_cache.prefix]
    keys, weights = _keys_and_weights(self, hidden_states)
    queries = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
    queries, keys = _rotated(self, positions, rotary_emb, queries, self.k_norm(keys).unsqueeze(1))
    planned, form = step.planned, self.k_cache.impl.cache_format
    cache = self.k_cache.kv_cache[0] if isinstance(self.k_cache.kv_cache, list) else self.k_cache.kv_cache
    cache = form.view(cache, planned.block_size)
    cache.index_put_((planned.slot_blocks, planned.slot_offsets), keys.to(cache.dtype))
    scale = (self.head_dim * self.n_head) ** -0.5
    self.chooser.leave_choice(step, queries, weights.float() * scale, cache)


def _rotated(
    indexer: Any, positions: torch.Tensor, rotary_emb: Any, *vectors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Queries and keys, [T, heads, D], with the rotary part at its positions."""
    sizes, own = [indexer.rope_dim, indexer.head_dim - indexer.rope_dim], 0
    if indexer.rotates_last:
        sizes, own = sizes[::-1], 1
    parts = [list(x.split(sizes, dim=2)) for x in vectors]
    for each, rotated in zip(parts, rotary_emb(positions, *(each[own].contiguous() for each in parts)), strict=True):
        # Some layers of rotary positions return further leading dimensions.
        each[own] = rotated.reshape(each[own].shape)
    return tuple(torch.cat(each, dim=2) for each in parts)


def _keys_and_weights(indexer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, D] before their norm, and weights of the heads [T, H]."""
    if hasattr(indexer, IS_FUSED):
        keys, weights = getattr(indexer, IS_FUSED)(hidden_states)[0].split((indexer.head_dim, indexer.n_head), dim=1)
        return keys, weights
    return indexer.wk(hidden_states)[0], indexer.weights_proj(hidden_states)[0]
