"""The layout of the cache. Attention itself is the base's, which reads and writes by it."""

import torch

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl


class TarnFormat(CacheFormat):
    """Keys, then values, as [heads, head size, slots]: the memory is read along slots."""

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return num_blocks, 2, self.num_kv_heads, self.head_size, block_size

    def write(
        self,
        kv_cache: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        rows = self.rows(key, value).unflatten(1, (2, -1))  # [tokens, 2, heads, head size]
        kv_cache[blocks, :, :, :, offsets] = self.numbers.store(rows, kv_cache.dtype)

    def read(self, kv_cache: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = kv_cache[plan.pair_blocks]  # [pairs, blocks of a KV tile, 2, heads, head size, slots]
        tiles = blocks.permute(2, 0, 1, 5, 3, 4).flatten(2, 3)  # [2, pairs, KV tile, heads, head size]
        # Slots that no query sees may hold NaN, which no mask of attention removes.
        keys, values = self.numbers.restore(torch.where(plan.is_seen[..., None, None], tiles, 0))
        return keys, values


class TarnAttentionImpl(PagedAttentionImpl):
    def make_format(self) -> CacheFormat:
        return TarnFormat(self.num_kv_heads, self.head_size, self.numbers)


class TarnAttentionBackend(PagedAttentionBackend):
    reads_lines = False  # ``read`` gets a plan of pairs in every step.

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return TarnAttentionImpl
