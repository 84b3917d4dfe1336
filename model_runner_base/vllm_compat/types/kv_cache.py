"""Reads vLLM's KV-cache specs and ``KVCacheConfig`` into a ``CacheLayout``, and finds the layers that they are for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass(frozen=True)
class LayerCache:
    """Form of the keys and values that one attention layer keeps of a token."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    spec: Any
    """vLLM's KV-cache spec of the layer, with which its metadata builders are made."""


@dataclass(frozen=True)
class GroupLayout:
    """Layers that keep a token's keys and values in blocks of the same ids."""

    layers: dict[str, LayerCache]
    """Layers by name."""
    block_size: int
    """Number of tokens in one of the scheduler's blocks."""


@dataclass(frozen=True)
class TensorLayout:
    """Memory that layers share. They are in different groups, so no two of them use a block at a time."""

    num_blocks: int
    """Number of the scheduler's blocks in this memory."""
    layer_names: list[str]


@dataclass(frozen=True)
class CacheLayout:
    """Layout of a model's whole KV cache.

    Example: a model of two layers that see everything and one with a sliding window, blocks of 16 tokens:

        CacheLayout(num_blocks=100, groups=[GroupLayout({"layers.0": ..., "layers.2": ...}, block_size=16),
                                            GroupLayout({"layers.1": ...}, block_size=16)],
                    tensors=[TensorLayout(num_blocks=100, layer_names=["layers.0", "layers.1"]),
                             TensorLayout(num_blocks=100, layer_names=["layers.2"])])
    """

    num_blocks: int
    """Number of the scheduler's blocks in each group; block 0 is the null block, which no request gets."""
    groups: list[GroupLayout]
    tensors: list[TensorLayout]
    make_views: Callable[..., dict[str, torch.Tensor]] | None = None
    """Function that makes the one buffer of all layers, and each layer's view of it for vLLM's own kernels; None if
    vLLM does not place all layers in one buffer."""


planning: Any = kv_cache_utils
if not hasattr(planning, "get_kv_cache_groups"):
    planning = import_module("vllm.v1.core.kv_cache_planning")

WINDOW_OF_LATENTS: Any = getattr(kv_cache_interface, "SlidingWindowMLASpec", MLAAttentionSpec)
"""Spec of latents that are kept for a window alone, in releases that have one."""
HAS_VIRTUAL_ENGINES = "virtual_engine" in ForwardContext.__dataclass_fields__
IS_ONE_BUFFER = "layers" in KVCacheTensor.__dataclass_fields__
"""Whether vLLM places the layers in one buffer, by strides, in a layout that backends name. Otherwise each tensor is
memory of its own, in a shape that a backend gives."""

__all__ = [
    "CacheLayout",
    "GroupLayout",
    "KVCacheConfig",
    "KVCacheSpec",
    "LayerCache",
    "TensorLayout",
    "attends_to_encoder",
    "attention_layers",
    "bind_cache",
    "bytes_for_requests",
    "cacheless_layers",
    "cross_length",
    "held_requests",
    "is_of_attention",
    "is_of_encoder",
    "is_of_latents",
    "keeps_window_blocks",
    "larger_head",
    "layer_caches",
    "raise_limit_for_encoder",
    "read_layout",
    "sees_whole_context",
    "shared_caches",
    "useful_bytes",
]


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Attention layers by name, which may keep a cache; vLLM counts recurrent layers among them, this does not."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    return {name: layer for name, layer in layers.items() if not isinstance(layer, MambaBase)}


def cross_length(vllm_config: VllmConfig) -> int:
    """Rows of encoder output, for each request of an encoder-decoder model, to which inputs are padded; else 0."""
    model = vllm_config.model_config
    return int(model.hf_config.max_source_positions) if model.is_encoder_decoder else 0


def raise_limit_for_encoder(vllm_config: VllmConfig) -> None:
    """Raises the limit of a step's tokens to the encoder's length if it is lower, so that it need not be given.

    vLLM counts an encoder's output as tokens, and would not start with a lower limit.
    """
    scheduler, length = vllm_config.scheduler_config, cross_length(vllm_config)
    if scheduler.max_num_batched_tokens < length:
        scheduler.max_num_batched_tokens = length
        scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = length


def attends_to_encoder(layer: Any) -> bool:
    """Whether a layer is one of cross-attention, which keeps an encoder's output."""
    return getattr(layer, "attn_type", None) == AttentionType.ENCODER_DECODER


def is_of_encoder(spec: Any) -> bool:
    """Whether a KV-cache spec is that of a cross-attention layer."""
    return isinstance(spec, CrossAttentionSpec)


def is_of_latents(spec: Any) -> bool:
    """Whether a KV-cache spec is that of a layer of latent attention, which keeps one row a token."""
    return isinstance(spec, MLAAttentionSpec | WINDOW_OF_LATENTS)


def larger_head(spec: AttentionSpec) -> int:
    """Head size of keys or of values, whichever is larger. Not every spec of older releases has one of values."""
    return max(spec.head_size, getattr(spec, "head_size_v", None) or 0)


def shared_caches(vllm_config: VllmConfig) -> dict[str, str]:
    """Layers that read another layer's cache instead of keeping one, with that layer's name."""
    targets = {
        name: getattr(layer, "kv_sharing_target_layer_name", None)
        for name, layer in attention_layers(vllm_config).items()
    }
    return {name: target for name, target in targets.items() if target is not None}


def cacheless_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Attention layers, by name, that keep nothing for a later step, in a cache of their own or of another layer."""
    sharing = shared_caches(vllm_config)
    layers = attention_layers(vllm_config).items()
    return {
        name: layer for name, layer in layers if name not in sharing and layer.get_kv_cache_spec(vllm_config) is None
    }


def is_of_attention(spec: Any) -> bool:
    """Whether a KV-cache spec is that of an attention layer."""
    return isinstance(spec, AttentionSpec)


def sees_whole_context(spec: Any) -> bool:
    """Whether a KV-cache spec is that of a layer that keeps the keys of a request's whole context."""
    return isinstance(spec, FullAttentionSpec)


def keeps_window_blocks(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler keeps the blocks of a window until it is known which drafts were right."""
    cls = vllm_config.scheduler_config.get_scheduler_cls()
    # Newer releases free blocks by the tokens that have been read.
    by_tokens_read = "processed_computed_tokens" in signature(KVCacheManager.remove_skipped_blocks).parameters
    return by_tokens_read or getattr(cls, "keeps_window_blocks", False)


def layer_caches(specs: Mapping[str, KVCacheSpec]) -> dict[str, LayerCache]:
    """Cache of each attention layer, by name; layers with another kind of cache are left out."""
    return {
        name: LayerCache(spec.num_kv_heads, spec.head_size, spec.dtype, spec)
        for name, spec in specs.items()
        if isinstance(spec, AttentionSpec)
    }


def read_layout(config: KVCacheConfig) -> CacheLayout:
    """Reads the layout that vLLM chose for the available memory."""
    groups, page_bytes = [], {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = dict.fromkeys(group.layer_names, spec)
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs = spec.kv_cache_specs
        page_bytes.update({name: each.page_size_bytes for name, each in specs.items()})
        groups.append(GroupLayout(layer_caches(specs), spec.block_size))
    if IS_ONE_BUFFER:
        tensors = [TensorLayout(config.num_blocks, names) for names in _by_place(config.kv_cache_tensors)]
        return CacheLayout(config.num_blocks, groups, tensors, partial(_make_views, config))
    tensors = [
        TensorLayout(tensor.size // page_bytes[tensor.shared_by[0]], list(tensor.shared_by))
        for tensor in config.kv_cache_tensors
    ]
    return CacheLayout(config.num_blocks, groups, tensors)


def _by_place(tensors: Sequence[Any]) -> list[list[str]]:
    """Lists of layers that share a place of the buffer, each of another group. The layout is layer by layer."""
    names: dict[int, list[str]] = {}
    for tensor in tensors:
        for index, name in enumerate(tensor.layers):
            names.setdefault(tensor.offset + index * tensor.layer_stride, []).append(name)
    return list(names.values())


def _make_views(
    config: KVCacheConfig, vllm_config: VllmConfig, backends: Mapping[str, type[AttentionBackend]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Makes the cache of every layer, in one buffer of zeros; ``backends`` are by layer."""
    from vllm.v1.worker.utils import allocate_kv_cache, select_common_block_size  # type: ignore[attr-defined]

    sizes = [
        select_common_block_size(
            group.kv_cache_spec.block_size, [backends[group.layer_names[0]]], [group.kv_cache_spec]
        )
        for group in config.kv_cache_groups
    ]
    cache_config: Any = vllm_config.cache_config
    return allocate_kv_cache(config, device, cache_config.get_resolved_kv_cache_layout(), sizes)


def bind_cache(layer: Any, caches: Sequence[torch.Tensor]) -> None:
    """Gives a layer its cache: a tensor, or the tuple of a recurrent layer's; in a list where there are virtual
    engines.

    vLLM makes an attention layer with that list, but not a recurrent one.
    """
    cache, is_list = caches[0], isinstance(getattr(layer, "kv_cache", None), list)
    if isinstance(layer, MambaBase):
        cache, is_list = tuple(caches), HAS_VIRTUAL_ENGINES  # type: ignore[assignment]
    layer.kv_cache = [cache] if is_list else cache


def useful_bytes(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_lines: int | None) -> float:
    """Bytes of KV cache that can be used, if a request needs one of ``num_lines`` lines in each group.

    A paged cache (None) can use any amount, at least to keep prefixes. If there are several groups, a request has a
    line in each, and groups of fewer layers leave a part of theirs unused.
    """
    if not specs or num_lines is None:
        return math.inf
    groups = planning.get_kv_cache_groups(vllm_config, dict(specs))
    return (num_lines * len(groups) + 1) * _block_bytes(groups)


def bytes_for_requests(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_requests: int) -> int:
    """Bytes of a KV cache that holds ``num_requests`` requests of ``max_model_len`` tokens, and the null block."""
    if not specs:
        return 0
    groups = planning.get_kv_cache_groups(vllm_config, dict(specs))
    return (num_requests * _blocks_of_request(vllm_config, groups) + 1) * _block_bytes(groups)


def held_requests(vllm_config: VllmConfig, config: KVCacheConfig) -> tuple[int, float]:
    """Bytes of a planned KV cache, and the number of requests of ``max_model_len`` tokens that it holds."""
    groups = config.kv_cache_groups
    if not groups:
        return 0, 0.0
    usable = config.num_blocks - 1  # No request gets the null block.
    return config.num_blocks * _block_bytes(groups), usable / _blocks_of_request(vllm_config, groups)


def _blocks_of_request(vllm_config: VllmConfig, groups: Sequence[Any]) -> int:
    """Blocks of a request of ``max_model_len`` tokens: all groups take theirs from one pool."""
    specs = [group.kv_cache_spec for group in groups]
    return sum(math.ceil(spec.max_memory_usage_bytes(vllm_config) / spec.page_size_bytes) for spec in specs)


def _block_bytes(groups: Sequence[Any]) -> int:
    """Bytes of a block, in the layers of the largest group."""
    if isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return groups[0].kv_cache_spec.page_size_bytes
    return max(len(group.layer_names) for group in groups) * groups[0].kv_cache_spec.page_size_bytes
