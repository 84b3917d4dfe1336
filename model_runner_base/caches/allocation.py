"""The caches on the device: allocated by a layout, and given to the layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.cache_format import Float8
from model_runner_base.attention.paged import reads_plans
from model_runner_base.caches.attention_groups import stored_size
from model_runner_base.caches.factory import KINDS
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_cache import (
    CacheLayout,
    LayerCache,
    attention_layers,
    bind_cache,
    shared_caches,
)
from model_runner_base.vllm_compat.types.recurrent import recurrent_layers


def allocate(
    layout: CacheLayout, vllm_config: VllmConfig, device_ops: DeviceOps, kv_tile_target: int
) -> tuple[list[torch.Tensor], dict[str, tuple[int, ...]]]:
    """Allocates caches, filled with zeros; returns them, and the indices of each layer's caches among them.

    Layers that share a tensor in the layout share memory here.

    The contents must be finite from the start: masked positions are multiplied by zero, not skipped.
    """
    layers = attention_layers(vllm_config)
    caches_of = {name: (group.block_size, cache) for group in layout.groups for name, cache in group.layers.items()}
    caches: list[torch.Tensor] = []
    index_of: dict[str, tuple[int, ...]] = {}
    backends = {name: layers[name].get_attn_backend() for name in caches_of}
    tensors = layout.tensors
    if layout.make_views is not None and not all(hasattr(each, "get_kv_cache_shape") for each in backends.values()):
        views_of = layout.make_views(vllm_config, backends, device_ops.device)
        index_of, caches, tensors = {name: (at,) for at, name in enumerate(views_of)}, list(views_of.values()), []
    for tensor in tensors:
        forms = {
            name: _Form.of(*caches_of[name], tensor.num_blocks, layers[name], vllm_config, kv_tile_target)
            for name in tensor.layer_names
        }
        if device_ops.has_float8_caches:
            forms = {name: form.of_floats(layers[name]) for name, form in forms.items()}
        first = forms[tensor.layer_names[0]]
        memory = device_ops.zeros(first.in_memory, first.dtype)
        views: dict[_Form, int] = {}
        for name, form in forms.items():
            if form.num_bytes != first.num_bytes:
                raise UnsupportedConfigError(
                    f"layers {tensor.layer_names[0]} and {name} share memory, but not the size of a block; such layers "
                    "are not supported yet"
                )
            # The base's attention makes its own view, so its layers share one tensor: a graph knows its state by it.
            form = first if form.is_ours else form
            if form not in views:
                views[form] = len(caches)
                caches.append(form.view(memory))
            index_of[name] = (views[form],)
    index_of.update({name: index_of[target] for name, target in shared_caches(vllm_config).items()})
    for own in (each for kind in KINDS for each in kind.own_tensors(vllm_config, kv_tile_target)):
        indices = tuple(range(len(caches), len(caches) + len(own.forms)))
        index_of.update(dict.fromkeys(own.layer_names, indices))
        caches += [device_ops.zeros(*form) for form in own.forms]
    return caches, index_of


class _Form(NamedTuple):
    """Form of the cache that a layer's backend asks for."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Order of the dimensions in memory, outermost first."""
    dtype: torch.dtype
    is_ours: bool
    """Whether the layer runs the base's own attention."""

    @classmethod
    def of(
        cls,
        block_size: int,
        layer: LayerCache,
        num_blocks: int,
        owner: Any,
        vllm_config: VllmConfig,
        kv_tile_target: int,
    ) -> "_Form":
        """Form for ``owner``, vLLM's layer of that cache."""
        backend: type[AttentionBackend] = owner.get_attn_backend()
        stored = stored_size(block_size, backend, vllm_config, kv_tile_target)
        blocks = num_blocks * (block_size // stored), stored
        if reads_plans(backend):
            shape = owner.impl.cache_format.shape(*blocks)
        else:
            cache_dtype = vllm_config.cache_config.cache_dtype
            shape = backend.get_kv_cache_shape(
                *blocks, layer.num_kv_heads, layer.head_size, cache_dtype_str=cache_dtype
            )
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return cls(shape, order, layer.dtype, reads_plans(backend))

    def of_floats(self, layer: Any) -> "_Form":
        """Form with the dtype of 8-bit floats in place of bytes, where the layer's numbers are such."""
        numbers = layer.impl.numbers if self.is_ours else None
        return self._replace(dtype=numbers.kind) if isinstance(numbers, Float8) else self

    @property
    def in_memory(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """View of contiguous ``memory`` in the shape, order and dtype that the backend asks for."""
        if memory.dtype != self.dtype or memory.shape != self.in_memory:
            memory = memory.view(-1).view(self.dtype).view(self.in_memory)
        if self.order == tuple(range(len(self.shape))):
            return memory
        return memory.permute(*(self.order.index(dim) for dim in range(len(self.order))))


def bind_kv_caches(
    caches: Sequence[torch.Tensor], index_of: Mapping[str, Sequence[int]], vllm_config: VllmConfig
) -> None:
    """Gives every layer its cache: the tensors at its indices."""
    layers = attention_layers(vllm_config) | recurrent_layers(vllm_config)
    for name, indices in index_of.items():
        bind_cache(layers[name], [caches[index] for index in indices])
