"""Pages of DeepSeek V4's caches: memory of one size for each block, which caches of several layers share.

vLLM gives all groups of layers blocks of one pool, so their pages must have one size. Of a token, layers keep rows of
up to 8,192 bytes for a few tokens, and entries of 8 bytes for a whole request. So blocks of windows have fewer tokens
than those of entries, and a page holds the block of one layer's rows, or those of several layers' entries. A layer
whose cache is not the first one of its pages is none that vLLM plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig

from model_runner_base.attention.compressed import CompressedBackend, CompressedMetadata, PageFormat, PageSlot
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.layers.indexer import IndexKeys
from model_runner_base.vllm_compat.types.deepseek_v4 import spec_of_pages

BLOCKS_IN_BLOCK = 8
"""Number of blocks of rows, or of a window's keys, that have the tokens of one block of entries."""


class Cache(NamedTuple):
    """One cache of a layer, in pages that it may share."""

    owner: Any
    """vLLM's layer whose pages they are."""
    place: PageSlot

    @property
    def rows(self) -> torch.Tensor:
        """[rows, size] view from the cache's first row on."""
        return self.place.rows(self.owner.kv_cache)

    def step(self, metadata: Any) -> CompressedMetadata:
        """Metadata of the cache's group."""
        found: CompressedMetadata = metadata[self.owner.prefix]
        return found


@dataclass
class WantedCache:
    """One cache that a layer needs, as it is before pages are laid out."""

    layer: Any
    """vLLM's layer that keeps it."""
    size: int
    """Number of numbers in a row."""
    dtype: torch.dtype
    tokens_per_row: int
    window: int
    """Number of tokens before which rows are dropped; 0: none are."""

    def form(self, block_size: int) -> tuple[int, torch.dtype, int, int, int]:
        """Row size, dtype, rows in a block, window and block size; caches that have these alike may share a page."""
        block_size = block_size // BLOCKS_IN_BLOCK if self.window else block_size
        return self.size, self.dtype, block_size // self.tokens_per_row, self.window, block_size

    def num_bytes(self, block_size: int) -> int:
        size, dtype, rows, *_ = self.form(block_size)
        return size * dtype.itemsize * rows


def lay_out(wanted: Sequence[WantedCache], vllm_config: VllmConfig) -> None:
    """Gives caches their places in pages of one size, and has vLLM plan the layers that own pages.

    Raises UnsupportedConfigError for caches that pages do not hold whole numbers of.
    """
    dtype: Any = vllm_config.model_config.dtype
    block_size = vllm_config.cache_config.block_size
    page_bytes = max((cache.num_bytes(block_size) for cache in wanted), default=0)
    shared: dict[tuple[Any, ...], list[WantedCache]] = {}
    for cache in wanted:
        shared.setdefault(cache.form(block_size), []).append(cache)
    for (size, row_dtype, rows, window, own_block), caches in shared.items():
        num_bytes = caches[0].num_bytes(block_size)
        if page_bytes % num_bytes:
            raise UnsupportedConfigError(
                f"caches of {num_bytes} bytes a block do not fill pages of {page_bytes}: use block_size=128 with "
                "compress_rates, head_dim and index_head_dim as published"
            )
        slots = page_bytes // num_bytes
        for number, cache in enumerate(caches):
            owner, slot = caches[number - number % slots].layer, number % slots
            cache.layer.cache = Cache(owner, PageSlot(size, row_dtype, rows, slots, slot))
            if slot:
                del vllm_config.compilation_config.static_forward_context[cache.layer.prefix]
                continue
            spec = spec_of_pages(own_block, page_bytes, dtype, window)
            owner.sliding_window = window or None
            owner.impl = IndexKeys(PageFormat(1, spec.head_size))
            owner.get_attn_backend = _backend
            owner.get_kv_cache_spec = lambda vllm_config, spec=spec: spec


def _backend() -> type[CompressedBackend]:
    return CompressedBackend
