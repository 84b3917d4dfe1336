"""Attention whose keys and values differ in head size, on the plans of paged attention.

A cache keeps one row for each KV head of a token: a key of D numbers, then a value of V. vLLM counts the memory of such
layers in the same way.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from model_runner_base.attention.cache_format import CacheFormat, read_lines
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl


@dataclass(frozen=True)
class UnequalFormat(CacheFormat):
    """Format with one row of ``head_size + value_size`` numbers for each KV head of a token: key, then value."""

    value_size: int = 0

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, self.num_kv_heads, self.head_size + self.value_size)

    def rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[T, K, D + V] what a cache holds of T tokens: keys, [T, K, D] or [T, K * D], and values, [T, K, V] or
        [T, K * V]."""
        heads = -1, self.num_kv_heads
        return torch.cat((key.view(*heads, self.head_size), value.view(*heads, self.value_size)), dim=2)

    def read(self, kv_cache: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of every pair, [P, S, K, D], and values, [P, S, K, V]."""
        if plan.pair_blocks is None:
            tiles = self.numbers.restore(read_lines(kv_cache, plan))
            return tiles[..., : self.head_size], tiles[..., self.head_size :]
        heads = -1, plan.kv_tile, self.num_kv_heads
        # Two gathers, as in CacheFormat.
        cache, entries = kv_cache.flatten(0, 1), plan.entries
        keys = cache[..., : self.head_size].index_select(0, entries).view(*heads, self.head_size)
        values = cache[..., self.head_size :].index_select(0, entries).view(*heads, self.value_size)
        return self.numbers.restore(keys), self.numbers.restore(values)


class UnequalHeadsBackend(PagedAttentionBackend):
    """Attention backend, as vLLM knows it, of layers whose values have a head size of their own."""

    head_size_v: ClassVar[int] = 0
    """Head size of values of the layer that is made next; vLLM's models set it, as on backends of vLLM's own."""

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        cls.head_size_v = head_size_v

    @classmethod
    def is_supported_on_current_device(cls, **_: Any) -> bool:
        """Whether a model may take this backend: on every device, in all sizes."""
        return True

    @staticmethod
    def get_impl_cls() -> type["UnequalHeadsImpl"]:
        return UnequalHeadsImpl


class UnequalHeadsImpl(PagedAttentionImpl):
    """Attention with values of V numbers a head, and queries and keys of D."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._value_size = UnequalHeadsBackend.head_size_v
        super().__init__(*args, **kwargs)

    @property
    def value_size(self) -> int:
        return self._value_size

    def make_format(self) -> CacheFormat:
        return UnequalFormat(self.num_kv_heads, self.head_size, self.numbers, self.value_size)
