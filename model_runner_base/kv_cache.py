"""KV-cache specs, allocation and binding. vLLM's unstable KVCacheConfig is read here and nowhere else."""

from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.plan import PlanGeometry, kv_tile_for
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
    if len({(spec.page_size_bytes, spec.block_size) for spec in specs.values()}) > 1:
        raise UnsupportedConfigError("models whose layers differ in KV heads or head size are not supported yet")
    return specs


def allocate(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, device_ops: DeviceOps
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
        num_blocks = tensor.size // spec.page_size_bytes
        shape = backend.get_kv_cache_shape(
            num_blocks,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
            cache_dtype_str=vllm_config.cache_config.cache_dtype,
        )
        index_of.update(dict.fromkeys(tensor.shared_by, len(caches)))
        caches.append(_zeros(shape, spec.dtype, backend, device_ops))
    index_of.update({name: index_of[target] for name, target in shared_caches(vllm_config).items()})
    return caches, index_of


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
        block_size = group.kv_cache_spec.block_size
        kv_tile = kv_tile_for(block_size, kv_tile_target)
        table = BlockTable(max_num_reqs, max_model_len, block_size, kv_tile // block_size)
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
