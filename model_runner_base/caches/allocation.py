"""The caches on the device: allocated by a layout, and given to the layers."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.layout import CacheLayout, LayerCache
from model_runner_base.attention.paged import PagedAttentionBackend, reads_plans
from model_runner_base.attention.plan import kv_tile_for, stored_block_size
from model_runner_base.attention.sight import Sight
from model_runner_base.caches.builders import decode_dims
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import plan_dims
from model_runner_base.caches.scratch import ScratchTable, check_serves_whole_requests, scratch_caches
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, Tiling
from model_runner_base.vllm_port.kv_cache import (
    KVCacheSpec,
    attends_to_encoder,
    attention_layers,
    bind_cache,
    cacheless_layers,
    cross_length,
    shared_caches,
    useful_bytes,
)
from model_runner_base.vllm_port.speculation import read_speculation


def is_contiguous(vllm_config: VllmConfig) -> bool:
    """Whether a block holds a whole request (``block_size=max_model_len``), so that a request has one cache line."""
    block_size = vllm_config.cache_config.block_size
    fits = block_size >= vllm_config.model_config.max_model_len
    return fits and block_size % kv_tile_for(block_size) == 0


def useful_memory(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> float:
    """Bytes of KV cache that may come to use: a contiguous cache needs a line a request, and the null block."""
    # An encoder's output has a length of its own, so its blocks are no line.
    has_lines = is_contiguous(vllm_config) and not cross_length(vllm_config)
    lines = vllm_config.scheduler_config.max_num_seqs if has_lines else None
    return useful_bytes(vllm_config, specs, lines)


def num_lines(layout: CacheLayout, vllm_config: VllmConfig) -> int:
    """Lines of a contiguous cache, the null block not counted, or 0 where reading all of them would not pay.

    So it is with more lines than there may be requests, and where a request has a line in each of several groups.
    """
    count = layout.num_blocks - 1
    pays = len(layout.groups) == 1 and count <= vllm_config.scheduler_config.max_num_seqs
    return count if pays and is_contiguous(vllm_config) else 0


def allocate(
    layout: CacheLayout, vllm_config: VllmConfig, device_ops: DeviceOps, kv_tile_target: int
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Zero-filled caches, and the index of each layer's; layers that share a tensor in the layout share memory here.

    The contents must be finite from the start: masked positions are multiplied by zero, not skipped.
    """
    layers = attention_layers(vllm_config)
    kept = {name: (group.block_size, cache) for group in layout.groups for name, cache in group.layers.items()}
    caches: list[torch.Tensor] = []
    index_of: dict[str, int] = {}
    backends = {name: layers[name].get_attn_backend() for name in kept}
    tensors = layout.tensors
    if layout.make_views is not None and not all(hasattr(each, "get_kv_cache_shape") for each in backends.values()):
        views_of = layout.make_views(vllm_config, backends, device_ops.device)
        index_of, caches, tensors = {name: at for at, name in enumerate(views_of)}, list(views_of.values()), []
    for tensor in tensors:
        forms = {
            name: _Form.of(*kept[name], tensor.num_blocks, layers[name].get_attn_backend(), vllm_config, kv_tile_target)
            for name in tensor.layer_names
        }
        first = forms[tensor.layer_names[0]]
        memory = device_ops.zeros(first.in_memory, first.dtype)
        views: dict[_Form, int] = {}
        for name, form in forms.items():
            if form.num_bytes != first.num_bytes:
                raise UnsupportedConfigError(
                    f"layers {tensor.layer_names[0]} and {name} share memory, but not the size of a block; such layers "
                    "are not supported yet"
                )
            # Attention in plain torch makes its own view: a graph knows its state by being these very tensors.
            form = first if form.is_ours else form
            if form not in views:
                views[form] = len(caches)
                caches.append(form.view(memory))
            index_of[name] = views[form]
    index_of.update({name: index_of[target] for name, target in shared_caches(vllm_config).items()})
    for scratch, names in scratch_caches(vllm_config, kv_tile_target).items():
        index_of.update(dict.fromkeys(names, len(caches)))
        caches.append(device_ops.zeros(*scratch))
    return caches, index_of


class _Form(NamedTuple):
    """How a layer's backend wants its cache."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions in memory, outermost first."""
    dtype: torch.dtype
    is_ours: bool
    """The base's own attention."""

    @classmethod
    def of(
        cls,
        block_size: int,
        layer: LayerCache,
        num_blocks: int,
        backend: type[AttentionBackend],
        vllm_config: VllmConfig,
        kv_tile_target: int,
    ) -> "_Form":
        stored = _stored_block_size(block_size, backend, vllm_config, kv_tile_target)
        shape = backend.get_kv_cache_shape(
            num_blocks * (block_size // stored),
            stored,
            layer.num_kv_heads,
            layer.head_size,
            cache_dtype_str=vllm_config.cache_config.cache_dtype,
        )
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return cls(shape, order, layer.dtype, reads_plans(backend))

    @property
    def in_memory(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Memory, which is contiguous, as the backend wants it."""
        if memory.dtype != self.dtype or memory.shape != self.in_memory:
            memory = memory.view(-1).view(self.dtype).view(self.in_memory)
        if self.order == tuple(range(len(self.shape))):
            return memory
        return memory.permute(*(self.order.index(dim) for dim in range(len(self.order))))


def _least_tile(vllm_config: VllmConfig, kv_tile_target: int) -> int:
    """The KV tile of the configured block size, which ``StepLimits`` count pairs with.

    vLLM multiplies the block size of groups whose layers keep less of a token; their tiles must not be smaller.
    """
    return kv_tile_for(vllm_config.cache_config.block_size, kv_tile_target)


def _least_chunk_tile(vllm_config: VllmConfig, tiles: tuple[int, int]) -> int:
    """The same of chunks' tiles."""
    return whole_blocks(stored_block_size(vllm_config.cache_config.block_size, tiles[0]), tiles[1])


def _stored_block_size(
    block_size: int, backend: type[AttentionBackend], vllm_config: VllmConfig, kv_tile_target: int
) -> int:
    """Kernels of a backend's own take blocks as they are."""
    if not reads_plans(backend):
        return block_size
    return stored_block_size(block_size, kv_tile_target, _least_tile(vllm_config, kv_tile_target))


def bind(caches: Sequence[torch.Tensor], index_of: dict[str, int], vllm_config: VllmConfig) -> None:
    """Gives every attention layer its cache."""
    layers = attention_layers(vllm_config)
    for name, index in index_of.items():
        bind_cache(layers[name], caches[index])


def attention_groups(
    layout: CacheLayout, vllm_config: VllmConfig, max_num_reqs: int, max_model_len: int, tiles: tuple[int, int]
) -> tuple[list[BlockTable], list[AttentionGroup]]:
    """One block table a KV-cache group, one attention group for each backend and sight among the group's layers, and
    for each spec where metadata builders ask for it.

    Layers without a cache of their own are in further attention groups, whose block table is not the scheduler's.

    ``tiles``: the most positions of a decode row's KV tile, and of a chunk's.
    """
    layers = attention_layers(vllm_config)
    sharing = shared_caches(vllm_config)
    tables, groups = [], []
    for group in layout.groups:
        first = layers[next(iter(group.layers))]
        cut = _Cut.of(group.block_size, first.get_attn_backend(), vllm_config, tiles)
        parts = group.block_size // cut.block_size
        cross_len = cross_length(vllm_config) if attends_to_encoder(first) else 0
        table = BlockTable(max_num_reqs, cross_len or max_model_len, cut.block_size, cut.blocks_per_tile, parts)
        tables.append(table)
        readers = {name: group.layers[target] for name, target in sharing.items() if target in group.layers}
        kept = group.layers | readers
        seen = {name: sight_of(layers[name]) for name in kept}
        for (backend, sight, _), names in _alike(seen, layers, kept).items():
            spec = kept[names[0]].spec
            parts_of_group = cut.kv_tile, cut.chunk_kv_tile, sight, backend, spec, cross_len
            groups.append(AttentionGroup(names, table, *parts_of_group))
    return tables, groups + _scratch_groups(vllm_config, max_num_reqs, max_model_len, tiles)


def _scratch_groups(
    vllm_config: VllmConfig, max_num_reqs: int, max_model_len: int, tiles: tuple[int, int]
) -> list[AttentionGroup]:
    """Of layers without a cache of their own, all on one block table, of which the scheduler knows nothing."""
    layers = cacheless_layers(vllm_config)
    if not layers:
        return []
    check_serves_whole_requests(vllm_config)
    cut = _Cut.of(vllm_config.cache_config.block_size, PagedAttentionBackend, vllm_config, tiles)
    table = ScratchTable(max_num_reqs, max_model_len, cut.block_size, cut.blocks_per_tile)
    seen = {name: sight_of(layer)._replace(is_whole=True) for name, layer in layers.items()}
    return [
        AttentionGroup(names, table, cut.kv_tile, cut.chunk_kv_tile, sight, backend)
        for (backend, sight, _), names in _alike(seen, layers, {}).items()
    ]


class _Cut(NamedTuple):
    """How the positions of a group's requests are cut."""

    block_size: int
    """Of the cache tensors."""
    kv_tile: int
    chunk_kv_tile: int
    blocks_per_tile: int
    """So many blocks are whole tiles of both kinds."""

    @classmethod
    def of(
        cls, block_size: int, backend: type[AttentionBackend], vllm_config: VllmConfig, tiles: tuple[int, int]
    ) -> "_Cut":
        """From the scheduler's block size."""
        stored = _stored_block_size(block_size, backend, vllm_config, tiles[0])
        kv_tile = kv_tile_for(block_size, tiles[0], _least_tile(vllm_config, tiles[0]))
        chunk_kv_tile = whole_blocks(stored, tiles[1], _least_chunk_tile(vllm_config, tiles))
        return cls(stored, kv_tile, chunk_kv_tile, math.lcm(max(1, kv_tile // stored), chunk_kv_tile // stored))


def _alike(
    seen: dict[str, Sight], layers: dict[str, Any], kept: dict[str, LayerCache]
) -> dict[tuple[type[AttentionBackend], Sight, Any], list[str]]:
    """Names of layers by their backend, by what their tokens see, and by what a metadata builder is made with."""
    alike: dict[tuple[type[AttentionBackend], Sight, Any], list[str]] = {}
    for name, sight in seen.items():
        backend = layers[name].get_attn_backend()
        spec = None if reads_plans(backend) else kept[name].spec
        alike.setdefault((backend, sight, spec), []).append(name)
    return alike


def sight_of(layer: Any) -> Sight:
    """What the tokens of an attention layer of vLLM's see, if no more than what comes before them."""
    window, chunk = getattr(layer, "sliding_window", None), getattr(layer, "attention_chunk_size", None)
    return Sight(window or 0, chunk or 0)


def whole_blocks(block_size: int, target: int, least: int = 1) -> int:
    """So many positions as make whole blocks, near ``target``, and ``least``."""
    return max(target // block_size, -(-least // block_size)) * block_size


def step_limits(
    vllm_config: VllmConfig, max_model_len: int, kv_tile: int, chunk_query_tile: int, chunk_kv_tile: int, num_lines: int
) -> StepLimits:
    """What the scheduler may ask of a step, and how attention will be cut: tiles as ``ModelRunnerBase`` has them."""
    scheduler = vllm_config.scheduler_config
    speculation = read_speculation(vllm_config)
    decode = Tiling(1 + speculation.num_drafts, _least_tile(vllm_config, kv_tile))
    chunk = Tiling(chunk_query_tile, _least_chunk_tile(vllm_config, (kv_tile, chunk_kv_tile)))
    layers = attention_layers(vllm_config).values()
    has_plans = all(reads_plans(layer.get_attn_backend()) for layer in layers)
    cross_len = cross_length(vllm_config)
    return StepLimits(
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_reqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        decode=decode,
        chunk=chunk,
        dims=(*COMMON_DIMS, *(plan_dims(decode, chunk, cross_len) if has_plans else decode_dims(decode))),
        num_lines=num_lines,
        unread=speculation.unread,
        ahead=speculation.ahead,
        pass_tokens=speculation.pass_tokens,
        cross_len=cross_len,
        # A prompt comes whole, in the step that its sound is encoded in.
        max_arrivals=max(1, scheduler.max_num_encoder_input_tokens // cross_len) if cross_len else None,
    )
