"""Attention groups of a model, the layers that are planned together: block tables, and sizes of KV tiles."""

import math
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.paged import PagedAttentionBackend, reads_plans
from model_runner_base.attention.plan import KeyRange, kv_tile_for, stored_block_size
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.scratch import ScratchTable, check_serves_whole_requests
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.request_states import BlockTable
from model_runner_base.vllm_compat.types.kv_cache import (
    CacheLayout,
    LayerCache,
    attends_to_encoder,
    attention_layers,
    cacheless_layers,
    cross_length,
    shared_caches,
)
from model_runner_base.vllm_compat.types.recurrent import has_states, recurrent_layers


def attention_groups(
    layout: CacheLayout, vllm_config: VllmConfig, max_num_reqs: int, max_model_len: int, tiles: tuple[int, int]
) -> tuple[list[BlockTable], list[AttentionGroup]]:
    """Makes a block table for each KV-cache group, and an attention group for each backend and key range in it.

    Layers with metadata builders are also split by KV-cache spec. Layers without a cache of their own are in further
    attention groups, whose block table is not the scheduler's.

    ``tiles``: target sizes, in positions, of the KV tiles of decode rows and of chunks.
    """
    if has_states(vllm_config) and not recurrent_layers(vllm_config):
        raise UnsupportedConfigError(
            "a stage of the pipeline has no recurrent layer, which is not supported yet: use a smaller "
            "pipeline_parallel_size"
        )
    layers = attention_layers(vllm_config)
    sharing = shared_caches(vllm_config)
    tables, groups = list[BlockTable](), list[AttentionGroup]()
    for group in layout.groups:
        if not group.layers:
            raise UnsupportedConfigError(
                "a stage of the pipeline has no layer of one of the model's groups of caches, which is not supported "
                "yet: use a smaller pipeline_parallel_size"
            )
        first = layers[next(iter(group.layers))]
        cut = _Cut.of(group.block_size, first.get_attn_backend(), vllm_config, tiles)
        blocks_per_kv_block = group.block_size // cut.block_size
        cut = cut.over(vllm_config.parallel_config.decode_context_parallel_size)
        cross_len = cross_length(vllm_config) if attends_to_encoder(first) else 0
        max_len = cross_len or max_model_len
        table = BlockTable(max_num_reqs, max_len, cut.block_size, cut.blocks_per_tile, blocks_per_kv_block)
        tables.append(table)
        readers = {name: group.layers[target] for name, target in sharing.items() if target in group.layers}
        caches = group.layers | readers
        seen = {name: key_range_of(layers[name]) for name in caches}
        sizes = cut.kv_tile, cut.chunk_kv_tile
        groups += [
            AttentionGroup(names, table, *sizes, key_range, backend, caches[names[0]].spec, cross_len)
            for (backend, key_range, _), names in _alike(seen, layers, caches).items()
        ]
    return tables, groups + _scratch_groups(vllm_config, max_num_reqs, max_model_len, tiles)


def _scratch_groups(
    vllm_config: VllmConfig, max_num_reqs: int, max_model_len: int, tiles: tuple[int, int]
) -> list[AttentionGroup]:
    """Groups of layers without a cache of their own. They share one block table, which the scheduler does not know
    of."""
    layers = cacheless_layers(vllm_config)
    if not layers:
        return []
    check_serves_whole_requests(vllm_config)
    cut = _Cut.of(vllm_config.cache_config.block_size, PagedAttentionBackend, vllm_config, tiles)
    table = ScratchTable(max_num_reqs, max_model_len, cut.block_size, cut.blocks_per_tile)
    seen = {name: key_range_of(layer)._replace(is_whole=True) for name, layer in layers.items()}
    return [
        AttentionGroup(names, table, cut.kv_tile, cut.chunk_kv_tile, key_range, backend)
        for (backend, key_range, _), names in _alike(seen, layers, {}).items()
    ]


class _Cut(NamedTuple):
    """Sizes of the blocks and KV tiles that the positions of a group's requests are cut into."""

    block_size: int
    """Block size of the cache tensors."""
    kv_tile: int
    chunk_kv_tile: int
    blocks_per_tile: int
    """Smallest number of blocks that fills whole tiles of both kinds."""

    @classmethod
    def of(
        cls, block_size: int, backend: type[AttentionBackend], vllm_config: VllmConfig, tiles: tuple[int, int]
    ) -> "_Cut":
        """Cuts the scheduler's block size."""
        stored = stored_size(block_size, backend, vllm_config, tiles[0])
        kv_tile = kv_tile_for(block_size, tiles[0], least_tile(vllm_config, tiles[0]))
        chunk_kv_tile = whole_blocks(stored, tiles[1], least_chunk_tile(vllm_config, tiles))
        return cls(stored, kv_tile, chunk_kv_tile, math.lcm(max(1, kv_tile // stored), chunk_kv_tile // stored))

    def over(self, ranks: int) -> "_Cut":
        """Sizes in positions where each of ``ranks`` keeps a part of them (attention/decode_context.py)."""
        return _Cut(self.block_size * ranks, self.kv_tile * ranks, self.chunk_kv_tile * ranks, self.blocks_per_tile)


def _alike(
    seen: dict[str, KeyRange], layers: dict[str, Any], caches: dict[str, LayerCache]
) -> dict[tuple[type[AttentionBackend], KeyRange, Any], list[str]]:
    """Names of layers by backend, key range, and the spec that a metadata builder is made with (None without one)."""
    alike: dict[tuple[type[AttentionBackend], KeyRange, Any], list[str]] = {}
    for name, key_range in seen.items():
        backend = layers[name].get_attn_backend()
        spec = None if reads_plans(backend) else caches[name].spec
        alike.setdefault((backend, key_range, spec), []).append(name)
    return alike


def key_range_of(layer: Any) -> KeyRange:
    """Key range of one of vLLM's attention layers whose tokens see no later keys."""
    window, chunk = getattr(layer, "sliding_window", None), getattr(layer, "attention_chunk_size", None)
    return KeyRange(window or 0, chunk or 0)


def least_tile(vllm_config: VllmConfig, kv_tile_target: int) -> int:
    """KV tile of decode rows for the configured block size, with which ``StepLimits`` count pairs.

    vLLM multiplies the block size of groups whose layers keep less of a token; their tiles must not be smaller.
    """
    return kv_tile_for(vllm_config.cache_config.block_size, kv_tile_target)


def least_chunk_tile(vllm_config: VllmConfig, tiles: tuple[int, int]) -> int:
    """KV tile of chunks with which ``StepLimits`` count pairs; ``tiles`` are ``KV_TILE`` and ``CHUNK_KV_TILE``."""
    return whole_blocks(stored_block_size(vllm_config.cache_config.block_size, tiles[0]), tiles[1])


def stored_size(block_size: int, backend: type[AttentionBackend], vllm_config: VllmConfig, kv_tile_target: int) -> int:
    """Number of tokens in a block of the cache tensors; a backend's own kernels take the scheduler's blocks as they
    are."""
    if not reads_plans(backend):
        return block_size
    return stored_block_size(block_size, kv_tile_target, least_tile(vllm_config, kv_tile_target))


def whole_blocks(block_size: int, target: int, least: int = 1) -> int:
    """Number of positions in as many whole blocks as fit in ``target``, and at least ``least``."""
    return max(target // block_size, -(-least // block_size)) * block_size
