"""Contents of caches by slot, through each layer's ``CacheFormat`` alone: no layout is taken for granted.

``write`` shows which numbers of a tensor a slot has, and ``read`` what lies in it. So a device may lay its caches out
as it likes, with transposed keys or with fused dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from vllm import LLM
from vllm.platforms import current_platform

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.testing.engine import core_of, runner_of
from model_runner_base.testing.precision import NotLooked

MARKED_BLOCKS, MARKED_SLOTS = 99_991, 1024
"""Sizes that tell the dimensions of a backend's cache apart, from three heads of 80 numbers."""
BLOCKS_AT_A_TIME = 16
"""Number of blocks that ``read`` is asked for at a time, so that a device compiles one size."""


@dataclass
class CacheLayer:
    """One attention layer with a ``CacheFormat``, and its cache."""

    group: int
    """Index of its KV-cache group."""
    block_size: int
    """Tokens of a block, as the scheduler counts."""
    num_blocks: int
    """Blocks of the scheduler."""
    layer: Any
    runner: Any

    @property
    def form(self) -> CacheFormat:
        form: CacheFormat = self.layer.impl.cache_format
        return form

    @property
    def cache(self) -> torch.Tensor:
        """The tensor that the layer is bound to."""
        return cache_of(self.layer)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def stored_size(self) -> int:
        """Tokens of a block of the tensor, which may be smaller than the scheduler's.

        Raises NotLooked if no size gives the tensor's shape.
        """
        sizes = [size for size in range(self.block_size, 0, -1) if not self.block_size % size]
        for size in sizes:
            if prod(self.form.shape(self.num_slots // size, size)) == self.cache.numel():
                viewed = tuple(self.form.view(self.cache, size).shape)
                if viewed == tuple(self.form.shape(self.num_slots // size, size)):
                    return size
        raise NotLooked(f"a cache of shape {tuple(self.cache.shape)} has not the shape of its format {self.form}")

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys [N, K, D] and values [N, K, V] in cache slots, float32."""
        size, ops = self.stored_size, self.runner.device_ops
        blocks, places = np.unique(slots // size, return_inverse=True)
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        with current_platform.inference_mode():
            view = self.form.view(self.cache, size)
            for start in range(0, len(blocks), BLOCKS_AT_A_TIME):
                plan = _plan_of(blocks[start : start + BLOCKS_AT_A_TIME], size, ops.to_device)
                for parts, part in zip(found, self.form.read(view, plan), strict=True):
                    parts.append(ops.to_host(part.float()).copy())
        keys, values = (np.concatenate(parts)[places, slots % size] for parts in found)
        return keys, values

    def numbers_of_slots(self) -> np.ndarray:
        """Indices [slots, N] of the numbers of each slot in the flattened tensor.

        Each number is found by the bits of its slot's index: the format writes ones to the slots that have the bit, and
        then to those that lack it. Numbers that several slots share, such as scales of a block, are left out.

        A ``write`` that leaves slots out may be the fault that is looked for. So ``CacheFormat.write`` is asked as
        well, where the shape is its own. Raises NotLooked if the format cannot write outside of a step, or if slots
        have no numbers of their own.
        """
        size, form = self.stored_size, self.form
        shape = form.shape(self.num_slots // size, size)
        writes = [type(form).write]
        if tuple(shape) == tuple(CacheFormat.shape(form, self.num_slots // size, size)):
            writes.append(CacheFormat.write)
        counts: np.ndarray = np.zeros(1, np.int64)
        for write in writes:
            own, slot = self._numbers_written(write)
            counts = np.bincount(slot, minlength=self.num_slots)
            if counts[0] and (counts == counts[0]).all():
                return own.reshape(self.num_slots, -1)
        raise NotLooked(f"{type(form).__name__}.write gives {counts.min()} to {counts.max()} numbers to a slot alone")

    def _numbers_written(self, write: Callable[..., None]) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the numbers that one slot alone has, in the order of slots; and the slot of each."""
        shape, every = tuple(self.cache.shape), np.arange(self.num_slots)
        index: np.ndarray = np.zeros(shape, np.int64)
        is_own: np.ndarray = np.ones(shape, bool)
        try:
            for bit in range(max(1, (self.num_slots - 1).bit_length())):
                has_bit = (every >> bit) & 1 == 1
                ones, zeros = self._written(every[has_bit], write), self._written(every[~has_bit], write)
                index += ones.astype(np.int64) << bit
                is_own &= ones ^ zeros
        except Exception as error:
            raise NotLooked(f"{type(self.form).__name__}.write does not run outside of a step: {error}") from error
        own = np.flatnonzero(is_own)
        own = own[np.argsort(index.ravel()[own], kind="stable")]
        return own, index.ravel()[own]

    def _written(self, slots: np.ndarray, write: Callable[..., None]) -> np.ndarray:
        """Mask of the numbers that ``write`` writes for tokens in slots, into a tensor like the cache."""
        ops, impl = self.runner.device_ops, self.layer.impl
        size, dtype = self.stored_size, self.runner.model_config.dtype
        # Always as many tokens, so that a device compiles one size: slots are repeated.
        padded = np.resize(slots, self.num_slots) if len(slots) else np.zeros(0, np.int64)
        with current_platform.inference_mode():
            probe = ops.zeros(tuple(self.cache.shape), self.cache.dtype)
            if len(padded):
                blocks, offsets = (ops.to_device(each.astype(np.int32)) for each in np.divmod(padded, size))
                keys, values = (
                    ops.upload(torch.ones(len(padded), self.form.num_kv_heads, width, dtype=dtype))
                    for width in (self.form.head_size, impl.value_size)
                )
                write(self.form, self.form.view(probe, size), blocks, offsets, keys, values)
            contents: np.ndarray = ops.to_host(probe if probe.dtype == torch.float32 else probe.float())
        return contents != 0


def cache_of(layer: Any) -> torch.Tensor:
    """The tensor that a layer of vLLM is bound to, which some releases keep in a list."""
    cache: torch.Tensor = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
    return cache


def _plan_of(blocks: np.ndarray, size: int, to_device: Callable[[np.ndarray], torch.Tensor]) -> PairPlan:
    """Plan of pairs whose KV tiles are the blocks, all of whose keys are seen."""
    padded = np.zeros(BLOCKS_AT_A_TIME, np.int32)
    padded[: len(blocks)] = blocks
    return PairPlan(
        block_size=size,
        kv_tile=size,
        pair_tile=to_device(np.arange(len(padded), dtype=np.int32)),
        pair_start=to_device(np.zeros(len(padded), np.int32)),
        pair_blocks=to_device(padded[:, None]),
        last=to_device(np.full((len(padded), 1), size - 1, np.int32)),
        first=None,
        merge_tree=[],
    )


def cache_layers(llm: LLM) -> dict[str, CacheLayer]:
    """Layers of an engine whose caches have a format, by name."""
    runner, config = runner_of(llm), core_of(llm).scheduler.kv_cache_config
    context = runner.vllm_config.compilation_config.static_forward_context
    return {
        name: CacheLayer(index, group.kv_cache_spec.block_size, config.num_blocks, context[name], runner)
        for index, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
        if isinstance(getattr(getattr(context.get(name), "impl", None), "cache_format", None), CacheFormat)
    }


def numbers_by_shape(shape: Sequence[int], num_blocks: int, block_size: int, backend: Any = None) -> np.ndarray:
    """Indices [slots, N] of the numbers of each slot in a flattened tensor, by the sizes of its dimensions.

    This is for a backend without a ``CacheFormat``: its ``get_kv_cache_shape`` says which dimension is which, if the
    sizes alone do not. Raises NotLooked unless one dimension alone can be that of blocks, and one that of their slots.
    """
    blocks, slots = ([dim for dim, size in enumerate(shape) if size == each] for each in (num_blocks, block_size))
    if backend is not None and (len(blocks) != 1 or len(slots) != 1 or blocks == slots):
        marked = backend.get_kv_cache_shape(MARKED_BLOCKS, MARKED_SLOTS, 3, 80)
        if len(marked) == len(shape):
            blocks = [dim for dim in blocks if marked[dim] == MARKED_BLOCKS]
            slots = [dim for dim in slots if marked[dim] == MARKED_SLOTS]
    if len(blocks) != 1 or len(slots) != 1 or blocks == slots:
        raise NotLooked(
            f"a cache of shape {tuple(shape)} has {len(blocks)} dimensions of {num_blocks} blocks and {len(slots)} of "
            f"{block_size} slots, and its backend has no CacheFormat that says which is which"
        )
    numbers = np.arange(prod(shape)).reshape(shape)
    return np.moveaxis(numbers, (blocks[0], slots[0]), (0, 1)).reshape(num_blocks * block_size, -1)


def backend_of(cache: torch.Tensor, runner: Any, is_same: Callable[[torch.Tensor, torch.Tensor], bool]) -> Any:
    """vLLM's attention backend of a layer that is bound to ``cache``; None if there is none."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    attention = (layer for layer in layers if hasattr(layer, "attn_backend") and hasattr(layer, "kv_cache"))
    return next((layer.attn_backend for layer in attention if is_same(cache_of(layer), cache)), None)
