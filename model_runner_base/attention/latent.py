"""Latent attention (multi-head latent attention, MLA; DeepSeek-V2, arXiv:2405.04434) on the plans of paged attention.

A token keeps one row for all heads: a latent of L numbers, and a rotary key of R. A head's key is ``W_K latent``
followed by the rotary key, and its value is ``W_V latent``. Both are linear in the latent, so they need not be made:

    q . (W_K latent) = (W_K^T q) . latent        sum of w_i (W_V latent_i) = W_V (sum of w_i latent_i)

In the latents' space this is attention with one KV head. Keys are whole rows, of L + R numbers, and values are their
latents. Decode rows and chunks are computed alike. models/layers/latent_attention.py takes queries to that space, and
outputs back.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from model_runner_base.attention.cache_format import CacheFormat, read_lines
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl


@dataclass(frozen=True)
class LatentFormat(CacheFormat):
    """Format with one row of ``head_size`` numbers a token: its latent, then its rotary key."""

    latent_size: int = 0

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, 1, self.head_size)

    def rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[T, 1, L + R] what a cache holds of T tokens: latents, ``value`` [T, L], then rotary keys, ``key`` [T, R]."""
        return torch.cat((value, key), dim=1).unsqueeze(1)

    def read(self, kv_cache: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of every pair, [P, S, 1, L + R], and their latents, [P, S, 1, L], by one gather."""
        if plan.pair_blocks is None:
            stored = read_lines(kv_cache, plan)
        else:
            stored = kv_cache.flatten(0, 1).index_select(0, plan.entries).view(-1, plan.kv_tile, 1, self.head_size)
        rows = self.numbers.restore(stored)
        return rows, rows[..., : self.latent_size]


class LatentAttentionBackend(PagedAttentionBackend):
    """Attention backend, as vLLM knows it, of layers with latents."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["LatentAttentionImpl"]:
        return LatentAttentionImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return LatentFormat(num_kv_heads, head_size).shape(num_blocks, block_size)


class LatentAttentionImpl(PagedAttentionImpl):
    """Attention in the latents' space: one KV head of L + R numbers, values of L.

    Raises NotImplementedError for an indexer, which chooses the keys that a token sees (attention/sparse.py).
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "kv_b_proj",
    )
    """Arguments that vLLM gives to attention with latents alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in self.NAMES}
        self.latent_size: int = given["kv_lora_rank"]
        super().__init__(*args, **kwargs)

    @property
    def value_size(self) -> int:
        return self.latent_size

    def make_format(self) -> CacheFormat:
        return LatentFormat(1, self.head_size, self.numbers, self.latent_size)


class NoPrefill:
    """Placeholder for vLLM's backend of prefill, which newer releases make for each layer: prompts are computed as
    decode rows are."""

    def __init__(self, **_: Any) -> None:
        """Takes a layer's sizes, and keeps nothing."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"
