"""vLLM's attention layers of DeepSeek V4 in plain torch: their forwards are replaced on the instances, after loading.

A layer has caches of its window's keys, of entries, of the rows that tokens leave to be compressed to these, and the
same of an indexer's keys (attention/compressed.py); they are in pages of one size (models/layers/compressed_pages.py).
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype

from model_runner_base.attention.choice import Chooser
from model_runner_base.attention.compressed import CompressedImpl, Compressor, EntryPlans
from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.models.layers.compressed_pages import Cache, WantedCache, lay_out
from model_runner_base.models.layers.hyper_connections import use_plain_connections
from model_runner_base.vllm_compat.probes.models import is_deepseek_v4


def use_plain_compressed(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Makes attention and hyper-connections of a loaded DeepSeek V4 run in plain torch.

    Raises UnsupportedConfigError for caches that no page size holds whole numbers of.
    """
    if not is_deepseek_v4(vllm_config.model_config.architecture):
        return
    use_plain_connections(model)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "swa_cache_layer")]
    wanted = [cache for layer in layers for cache in _prepare(layer, vllm_config.model_config)]
    lay_out(wanted, vllm_config)
    for layer in layers:
        if layer.compressor is None:  # The window's keys are another layer's of vLLM, and this one keeps nothing.
            del vllm_config.compilation_config.static_forward_context[layer.prefix]


def _prepare(layer: Any, model_config: ModelConfig) -> Iterator[WantedCache]:
    """Makes a layer compute in plain torch, and yields the caches that it needs."""
    dtype: Any = model_config.dtype
    with set_default_torch_dtype(dtype):  # As while vLLM makes a model: the cache's numbers follow from it.
        layer.window_impl = CompressedImpl(layer.n_local_heads, layer.head_dim, layer.scale, 1, sinks=layer.attn_sink)
    layer.max_len = model_config.max_model_len
    layer.forward = MethodType(forward, layer)
    yield WantedCache(layer.swa_cache_layer, layer.head_dim, dtype, 1, layer.window_size)
    if layer.compressor is not None:
        yield _prepare_compressor(layer.compressor)
        yield WantedCache(layer, layer.head_dim, dtype, layer.compress_ratio, 0)
    if layer.indexer is not None:
        indexer = layer.indexer
        yield _prepare_compressor(indexer.compressor)
        yield WantedCache(indexer.k_cache, indexer.head_dim, dtype, layer.compress_ratio, 0)
        indexer.chooser = Chooser(indexer.topk_tokens)


def _prepare_compressor(module: Any) -> WantedCache:
    module.compression = Compressor(module.compress_ratio, module.head_dim, module.overlap)
    window = (1 + module.overlap) * module.compress_ratio
    return WantedCache(module.state_cache, module.compression.row_size, torch.float32, 1, window)


def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    """Output [T, hidden] of a layer of any kind, for ``hidden_states`` [T, hidden]."""
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:
        return torch.zeros_like(hidden_states)
    low_rank, key = self.fused_wqa_wkv(hidden_states)[0].split((self.q_lora_rank, self.head_dim), dim=1)
    low_rank, key = self.q_norm(low_rank), self.kv_norm(key)
    query = self.wq_b(low_rank).view(-1, self.n_local_heads, self.head_dim)
    query = query * torch.rsqrt(query.float().square().mean(dim=2, keepdim=True) + self.eps).to(query.dtype)
    query, key = _rotated(self.rotary_emb, positions, query), _rotated(self.rotary_emb, positions, key)

    of_window: Cache = self.swa_cache_layer.cache
    window, keys = of_window.step(metadata).tables(of_window.place.slots), of_window.rows
    keys.index_put_((window.places,), key.to(keys.dtype))
    entries = compressed = None
    if self.compressor is not None:
        own: Cache = self.cache
        _compress(self.compressor, metadata, own, positions, hidden_states, self.rotary_emb)
        compressed = own.rows.view(-1, 1, 1, self.head_dim)
        plans = _plans(self, own, metadata)
        entries = (
            plans.all() if self.indexer is None else _chosen(self, plans, metadata, positions, hidden_states, low_rank)
        )
    keys = keys.view(-1, 1, 1, self.head_dim)
    out = self.window_impl.attend_both(query.flatten(1), window.planned, keys, entries, compressed)
    out = _rotated(self.rotary_emb, positions, out.view_as(query), is_back=True)
    groups = out.reshape(len(out), self.n_local_groups, -1).transpose(0, 1)
    weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
    return self.wo_b(torch.bmm(groups, weight.transpose(1, 2)).transpose(0, 1).flatten(1))


def _plans(self: Any, cache: Cache, metadata: Any) -> EntryPlans:
    """Plans over entries, or an indexer's keys of them, in ``cache``."""
    return cache.step(metadata).entries(cache.place.slots, self.compress_ratio, self.max_len)


def _chosen(
    self: Any,
    plans: EntryPlans,
    metadata: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    low_rank: torch.Tensor,
) -> PagedAttentionMetadata:
    """Plans over the entries that the layer's indexer chooses."""
    indexer = self.indexer
    cache: Cache = indexer.k_cache.cache
    _compress(indexer.compressor, metadata, cache, positions, hidden_states, self.rotary_emb)
    queries = indexer.wq_b(low_rank)[0].view(-1, indexer.n_head, indexer.head_dim)
    weights = indexer.weights_proj(hidden_states)[0].float() * (indexer.head_dim * indexer.n_head) ** -0.5
    queries = _rotated(self.rotary_emb, positions, queries)
    keys = cache.rows.view(-1, 1, 1, indexer.head_dim)
    return plans.chosen(indexer.chooser, queries, weights, keys, _plans(self, cache, metadata))


def _compress(
    module: Any,
    metadata: Any,
    to: Cache,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    rotary: Any,
) -> None:
    """Writes the tokens' rows, and the entries that they end to ``to``."""
    compression: Compressor = module.compression
    values, gates = module.fused_wkv_wgate(hidden_states).float().chunk(2, dim=1)
    gates = gates + module.ape[(positions % compression.rate).long()]
    cache: Cache = module.state_cache.cache
    step, slots, rows, entries = cache.step(metadata), cache.place.slots, cache.rows, to.rows
    rows.index_put_((step.tables(slots).places,), torch.cat((values, gates), dim=1))
    of_entries = to.step(metadata), to.place.slots
    for windows in step.windows(slots, *of_entries, compression.rate, compression.overlaps):
        mixtures = compression.mixtures(windows, rows)
        new = _rotated(rotary, windows.position, module.norm(mixtures.to(entries.dtype)))
        new = torch.where(windows.is_real.unsqueeze(2), new, 0)
        entries.index_put_((windows.entry,), new)


def _rotated(rotary: Any, positions: torch.Tensor, x: torch.Tensor, is_back: bool = False) -> torch.Tensor:
    """Vectors [*N, D], or of several heads [*N, H, D], with pairs of their last numbers rotated by positions [*N];
    ``is_back``: by minus these."""
    cos, sin = rotary.cos_sin_cache[positions.long()].float().chunk(2, dim=-1)
    if x.dim() > positions.dim() + 1:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    size = 2 * cos.shape[-1]
    first, second = x[..., -size:].float().unflatten(-1, (-1, 2)).unbind(-1)
    sin = -sin if is_back else sin
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-size], pairs.to(x.dtype)), dim=-1)
