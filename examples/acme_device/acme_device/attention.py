"""Attention by the kernel, where it can run."""

import torch

from acme_device.kernel import attend
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl


class AcmeAttentionImpl(PagedAttentionImpl):
    def is_plain(self, cache: torch.Tensor) -> bool:
        """Whether the kernel can run; the base's plain torch runs the rest."""
        extras = self.logits_soft_cap, self.alibi_slopes, self.sinks
        return not any(extra is not None for extra in extras) and cache.dtype == torch.float32

    def attend_decode(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        if not self.is_plain(kv_cache):
            return super().attend_decode(query, kv_cache, plan)
        tiles = query.view(-1, plan.last.shape[1], self.num_heads, self.head_size)
        return self.run(tiles, kv_cache, plan).view(query.shape)

    def attend_chunks(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        if not self.is_plain(kv_cache):
            return super().attend_chunks(query, kv_cache, plan)
        tiles = query.view(-1, self.num_heads, self.head_size)[plan.tile_tokens]  # [tiles, Q, H, D]
        return self.run(tiles, kv_cache, plan).flatten(0, 1)[plan.tile_slots].view(query.shape)

    def run(self, tiles: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        return attend(tiles, kv_cache, plan.pair_tile, plan.pair_blocks, plan.first, plan.last, self.scale)


class AcmeAttentionBackend(PagedAttentionBackend):
    reads_lines = False  # The kernel reads blocks, and no whole lines of a contiguous cache.

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return AcmeAttentionImpl
