"""KV-cache specs, allocation and binding. vLLM's unstable KVCacheConfig is read here and nowhere else."""

import math
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.attention.plan import PlanGeometry, kv_tile_for, stored_block_size
from model_runner_base.block_tables import BlockTable
from model_runner_base.device_ops import DeviceOps
from model_runner_base.limits import UnsupportedConfigError


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Every layer that may keep a cache, by name."""
    return get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]


def shared_caches(vllm_config: VllmConfig) -> dict[str, str]:
    """Layers that read another layer's cache instead of keeping one, with that layer's name."""
    targets = {
        name: getattr(layer, "kv_sharing_target_layer_name", None)
        for name, layer in attention_layers(vllm_config).items()
    }
    return {name: target for name, target in targets.items() if target is not None}


def collect_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The KV-cache spec of every layer that keeps a cache, by layer name."""
    specs: dict[str, KVCacheSpec] = {}
    sharing = shared_caches(vllm_config)
    for name, layer in attention_layers(vllm_config).items():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None or name in sharing:
            continue
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedConfigError(
                f"layer {name} keeps a {type(spec).__name__}; such layers are not supported yet"
            )
        specs[name] = spec
    if len({_shape(spec) for spec in specs.values()}) > 1:
        raise UnsupportedConfigError("models whose layers differ in KV heads or head size are not supported yet")
    return specs


def _shape(spec: Any) -> tuple[Any, ...]:
    """What all layers have in common, window or not."""
    sizes = spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", spec.head_size)
    return spec.page_size_bytes, spec.block_size, spec.dtype, *sizes


def is_contiguous(vllm_config: VllmConfig) -> bool:
    """Whether a block holds a whole request (``block_size=max_model_len``), so that a request has one cache line."""
    block_size = vllm_config.cache_config.block_size
    fits = block_size >= vllm_config.model_config.max_model_len
    return fits and block_size % kv_tile_for(block_size) == 0


def useful_memory(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> float:
    """Bytes of KV cache that may come to use: a contiguous cache needs a line a request, and the null block.

    A paged cache can use any amount, at least to remember prefixes. Where layers are in several groups, a request has a
    line in each, and groups of fewer layers leave part of theirs idle.
    """
    if not specs or not is_contiguous(vllm_config):
        return math.inf
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    num_lines = vllm_config.scheduler_config.max_num_seqs * len(groups) + 1
    largest = max(len(group.layer_names) for group in groups)
    return num_lines * largest * next(iter(specs.values())).page_size_bytes


def num_lines(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> int:
    """Lines of a contiguous cache, the null block not counted, or 0 where reading all of them would not pay.

    So it is with more lines than there may be requests, and where a request has a line in each of several groups.
    """
    count = kv_cache_config.num_blocks - 1
    pays = len(kv_cache_config.kv_cache_groups) == 1 and count <= vllm_config.scheduler_config.max_num_seqs
    return count if pays and is_contiguous(vllm_config) else 0


def allocate(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, device_ops: DeviceOps, kv_tile_target: int
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Zero-filled caches, and the index of each layer's; layers that share a tensor in the config share it here.

    The contents must be finite from the start: masked positions are multiplied by zero, not skipped.
    """
    layers = attention_layers(vllm_config)
    specs: dict[str, Any] = {
        name: group.kv_cache_spec for group in kv_cache_config.kv_cache_groups for name in group.layer_names
    }
    caches: list[torch.Tensor] = []
    index_of: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        spec = specs[tensor.shared_by[0]]
        backend = layers[tensor.shared_by[0]].get_attn_backend()
        block_size = _stored_block_size(spec, backend, kv_tile_target)
        num_blocks = tensor.size // spec.page_size_bytes * (spec.block_size // block_size)
        shape = backend.get_kv_cache_shape(
            num_blocks,
            block_size,
            spec.num_kv_heads,
            spec.head_size,
            cache_dtype_str=vllm_config.cache_config.cache_dtype,
        )
        index_of.update(dict.fromkeys(tensor.shared_by, len(caches)))
        caches.append(_zeros(shape, spec.dtype, backend, device_ops))
    index_of.update({name: index_of[target] for name, target in shared_caches(vllm_config).items()})
    return caches, index_of


def _stored_block_size(spec: KVCacheSpec, backend: type[AttentionBackend], kv_tile_target: int) -> int:
    """Kernels of a backend's own take blocks as they are."""
    is_ours = issubclass(backend, PagedAttentionBackend)
    return stored_block_size(spec.block_size, kv_tile_target) if is_ours else spec.block_size


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, backend: type[AttentionBackend], device_ops: DeviceOps
) -> torch.Tensor:
    """A cache in its backend's shape, with the dimensions in memory in the order that the backend wants, if any."""
    try:
        order = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError):
        return device_ops.zeros(shape, dtype)
    cache = device_ops.zeros(tuple(shape[dim] for dim in order), dtype)
    return cache.permute(*(order.index(dim) for dim in range(len(order))))


def bind(caches: list[torch.Tensor], index_of: dict[str, int], vllm_config: VllmConfig) -> None:
    """Gives every attention layer its cache."""
    layers = attention_layers(vllm_config)
    for name, index in index_of.items():
        layers[name].kv_cache = [caches[index]]


def attention_groups(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, max_num_reqs: int, max_model_len: int, kv_tile_target: int
) -> tuple[list[BlockTable], list[AttentionGroup]]:
    """One block table a KV-cache group, one attention group for each backend and window among the group's layers."""
    layers = attention_layers(vllm_config)
    sharing = shared_caches(vllm_config)
    tables, groups = [], []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kv_tile = kv_tile_for(spec.block_size, kv_tile_target)
        backend = layers[group.layer_names[0]].get_attn_backend()
        block_size = _stored_block_size(spec, backend, kv_tile_target)
        blocks_per_tile = max(1, kv_tile // block_size)
        table = BlockTable(max_num_reqs, max_model_len, block_size, blocks_per_tile, spec.block_size // block_size)
        tables.append(table)
        alike: dict[tuple[type[AttentionBackend], int | None], list[str]] = {}
        readers = [name for name, target in sharing.items() if target in group.layer_names]
        for name in (*group.layer_names, *readers):
            layer = layers[name]
            alike.setdefault((layer.get_attn_backend(), getattr(layer, "sliding_window", None)), []).append(name)
        for (backend, window), names in alike.items():
            geometry = PlanGeometry(block_size, kv_tile, -(-max_model_len // kv_tile), window)
            groups.append(AttentionGroup(names, table, geometry, backend, group.kv_cache_spec))
    return tables, groups
