"""vLLM's attention layers of DeepSeek V4 in plain torch: their forwards are replaced on the instances, after loading.

vLLM plans caches of several block sizes and windows for its own kernels. Here all are on one block table: keys of the
window, the rows that tokens leave to be compressed, entries, and an indexer's keys (attention/compressed.py).
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.choice import Chooser
from model_runner_base.attention.compressed import (
    CompressedBackend,
    CompressedImpl,
    CompressedMetadata,
    Compressor,
    EntryPlans,
    RowsFormat,
)
from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.models.layers.hyper_connections import use_plain_connections
from model_runner_base.models.layers.indexer import IndexKeys
from model_runner_base.vllm_compat.probes.models import is_deepseek_v4
from model_runner_base.vllm_compat.types.deepseek_v4 import spec_of_rows


def use_plain_compressed(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Makes attention and hyper-connections of a loaded DeepSeek V4 run in plain torch."""
    if not is_deepseek_v4(vllm_config.model_config.architecture):
        return
    use_plain_connections(model)
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "swa_cache_layer"):
            _prepare(layer, vllm_config.model_config)
            if layer.compressor is None:  # The window's keys are another layer's of vLLM, and this one keeps nothing.
                del vllm_config.compilation_config.static_forward_context[layer.prefix]


def _prepare(layer: Any, model_config: ModelConfig) -> None:
    dtype: Any = model_config.dtype
    with set_default_torch_dtype(dtype):  # As while vLLM makes a model: the cache's numbers follow from it.
        impl = CompressedImpl(layer.n_local_heads, layer.head_dim, layer.scale, 1, sinks=layer.attn_sink)
    window, size = layer.swa_cache_layer, layer.head_dim
    window.sliding_window = layer.window_size
    layer.window_impl = impl
    layer.max_len = model_config.max_model_len
    _keep(window, impl.cache_format, dtype, impl)
    layer.forward = MethodType(forward, layer)
    if layer.compressor is not None:
        _prepare_compressor(layer.compressor)
        rate = layer.compress_ratio
        _keep(layer, RowsFormat(1, size, tokens_per_row=rate), dtype)
    if layer.indexer is not None:
        indexer = layer.indexer
        _prepare_compressor(indexer.compressor)
        _keep(indexer.k_cache, RowsFormat(1, indexer.head_dim, tokens_per_row=layer.compress_ratio), dtype)
        indexer.chooser = Chooser(indexer.topk_tokens)


def _prepare_compressor(module: Any) -> None:
    module.compression = Compressor(module.compress_ratio, module.head_dim, module.overlap)
    del module.state_cache.sliding_window  # Rows are found by their places, not by a window.
    _keep(module.state_cache, RowsFormat(1, module.compression.row_size), torch.float32)


def _keep(owner: Any, form: CacheFormat, dtype: torch.dtype, impl: Any = None) -> None:
    """Has one of vLLM's layers keep a cache of this format."""
    owner.impl = impl or IndexKeys(form)
    owner.get_attn_backend = _backend
    owner.get_kv_cache_spec = _spec_of(form, dtype)


def _backend() -> type[CompressedBackend]:
    return CompressedBackend


def _spec_of(form: CacheFormat, dtype: torch.dtype) -> Callable[[VllmConfig], Any]:
    tokens_per_row = form.tokens_per_row if isinstance(form, RowsFormat) else 1
    return lambda vllm_config: spec_of_rows(vllm_config, form.head_size, dtype, tokens_per_row)


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

    window: PagedAttentionMetadata = metadata[self.swa_cache_layer.prefix]
    impl = self.window_impl
    keys = impl.cache_format.view(self.swa_cache_layer.kv_cache, window.block_size)
    keys.index_put_((window.slot_blocks, window.slot_offsets), key.unsqueeze(1).to(keys.dtype))
    entries = compressed = None
    if self.compressor is not None:
        step: CompressedMetadata = metadata[self.prefix]
        _compress(self.compressor, step, positions, hidden_states, self.rotary_emb, self.kv_cache)
        compressed = self.kv_cache.view(-1, 1, 1, self.head_dim)
        plans = step.entries(self.compress_ratio, self.max_len)
        entries = (
            plans.all() if self.indexer is None else _chosen(self, plans, step, positions, hidden_states, low_rank)
        )
    out = impl.attend_both(query.flatten(1), window, keys, entries, compressed)
    out = _rotated(self.rotary_emb, positions, out.view_as(query), is_back=True)
    groups = out.reshape(len(out), self.n_local_groups, -1).transpose(0, 1)
    weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
    return self.wo_b(torch.bmm(groups, weight.transpose(1, 2)).transpose(0, 1).flatten(1))


def _chosen(
    self: Any,
    plans: EntryPlans,
    step: CompressedMetadata,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    low_rank: torch.Tensor,
) -> PagedAttentionMetadata:
    """Plans over the entries that the layer's indexer chooses."""
    indexer = self.indexer
    cache = indexer.k_cache.kv_cache
    _compress(indexer.compressor, step, positions, hidden_states, self.rotary_emb, cache)
    queries = indexer.wq_b(low_rank)[0].view(-1, indexer.n_head, indexer.head_dim)
    weights = indexer.weights_proj(hidden_states)[0].float() * (indexer.head_dim * indexer.n_head) ** -0.5
    queries = _rotated(self.rotary_emb, positions, queries)
    return plans.chosen(indexer.chooser, queries, weights, cache.view(-1, 1, 1, indexer.head_dim))


def _compress(
    module: Any,
    step: CompressedMetadata,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    rotary: Any,
    entries: torch.Tensor,
) -> None:
    """Writes the tokens' rows, and the entries that they end."""
    compression: Compressor = module.compression
    values, gates = module.fused_wkv_wgate(hidden_states).float().chunk(2, dim=1)
    gates = gates + module.ape[(positions % compression.rate).long()]
    rows = module.state_cache.kv_cache
    rows.index_put_((step.slots,), torch.cat((values, gates), dim=1))
    for windows in step.windows(compression.rate, compression.overlaps):
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
