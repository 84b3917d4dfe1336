"""Attention of ranks that keep a part of each request's positions (decode context parallelism, DCP).

Ranks of a group take positions in turn, so each keeps a part of a request's keys and values. A rank is given the
queries of all ranks of the group, and attends to its own keys. The ranks exchange their partial results, and each
merges those of its own heads, by the rule of attention/pieces.py.

A step is planned on positions, as without DCP, and equally on all ranks: a block of the plan is a block of the cache on
each rank, and holds ``size`` times the positions. ``ContextPart`` turns the plan into one of the rank's own keys.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dcp_group

from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl
from model_runner_base.attention.pieces import Partial, exp
from model_runner_base.attention.plan import FAR
from model_runner_base.errors import refuse


class ContextPart(NamedTuple):
    """Positions that one of ``size`` ranks keeps: ``interleave`` at a time, in turn with the other ranks.

    Example of two ranks: with an interleave of 1, rank 0 keeps positions 0, 2, 4, 6; with an interleave of 4 it keeps
    0 to 3 and 8 to 11.
    """

    size: int
    rank: int
    interleave: int

    @classmethod
    def of_this_rank(cls, vllm_config: VllmConfig) -> Self:
        """Part of this process, once vLLM's process groups exist."""
        group = get_dcp_group()
        return cls(group.world_size, group.rank_in_group, vllm_config.parallel_config.cp_kv_cache_interleave_size)

    def num_kept(self, count: torch.Tensor) -> torch.Tensor:
        """Number of the first ``count`` positions that the rank keeps, of the same shape; 0 or less for 0 or less."""
        whole = count // (self.size * self.interleave) * self.interleave
        rest = count - whole * self.size - self.rank * self.interleave
        return whole + rest.clamp(0, self.interleave)

    def metadata_of(self, metadata: PagedAttentionMetadata) -> PagedAttentionMetadata:
        """Metadata over the rank's own keys; ``metadata`` are those over positions. Traceable.

        A token whose position another rank keeps is written to the null block.
        """
        place = self.num_kept(metadata.slot_offsets)
        is_own = self.num_kept(metadata.slot_offsets + 1) > place
        return PagedAttentionMetadata(
            slot_blocks=torch.where(is_own, metadata.slot_blocks, 0),
            slot_offsets=torch.where(is_own, place, 0),
            num_decode_tokens=metadata.num_decode_tokens,
            decode=metadata.decode and self._plan_of(metadata.decode),
            chunks=metadata.chunks and self._plan_of(metadata.chunks),
        )

    def _plan_of(self, plan: PairPlan) -> PairPlan:
        """Plan over the rank's keys. Its pairs are those of ``plan``, some of which may see no key."""
        assert plan.pair_start is not None and plan.first is None
        return replace(
            plan,
            block_size=plan.block_size // self.size,
            kv_tile=plan.kv_tile // self.size,
            pair_start=torch.where(plan.pair_start == FAR, FAR, plan.pair_start // self.size),
            last=self.num_kept(plan.last + 1) - 1,  # A KV tile begins with the first position of a turn.
        )


class ContextBackend(PagedAttentionBackend):
    """Attention backend, as vLLM knows it, of devices whose ranks keep parts of each request."""

    reads_lines: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type["ContextImpl"]:
        return ContextImpl


class ContextImpl(PagedAttentionImpl):
    """Attention of decoder layers with one KV head on a rank, which all ranks of a group have.

    Raises UnsupportedConfigError for a layer with a window, sinks or ALiBi.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, head_size, scale, *args, **kwargs)
        refusals = {
            "a sliding window is not cut over positions yet: use decode_context_parallel_size=1": self.sliding_window,
            "attention with ALiBi is not cut over positions yet: use decode_context_parallel_size=1": (
                self.alibi_slopes is not None
            ),
            "attention with sinks is not cut over positions yet: use decode_context_parallel_size=1": (
                self.sinks is not None
            ),
            f"{self.num_kv_heads} KV heads on a rank are not cut over positions: use decode_context_parallel_size=1": (
                self.num_kv_heads > 1
            ),
        }
        refuse(refusals)
        self._size, self._rank = self.dcp_world_size, self.dcp_rank
        self._of_all_heads = PartialImpl(num_heads * self._size, head_size, scale, *args, **kwargs)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: PagedAttentionMetadata
    ) -> torch.Tensor:
        num_tokens = query.shape[0]
        queries = self.all_gather(query).view(self._size, num_tokens, -1).transpose(0, 1).flatten(1)
        own = self._of_all_heads.attend(queries.float(), kv_cache, attn_metadata)
        parts = self.all_gather(own).view(self._size, num_tokens, self._size, self.num_heads, -1)[:, :, self._rank]
        out, maximum, total = parts.split((self.value_size, 1, 1), dim=3)
        weights = exp(maximum - maximum.amax(dim=0, keepdim=True))
        out = (out * weights).sum(dim=0) / (total * weights).sum(dim=0).clamp(min=1e-30)  # Padding sees nothing.
        return out.flatten(1).to(query.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N * T, W] rows of all N ranks of the group, from the T rows of each."""
        return get_dcp_group().all_gather(x.contiguous(), 0)


class PartialImpl(PagedAttentionImpl):
    """Attention to a part of the keys: returns [T, H * (V + 2)] float32 for float32 queries.

    Each head has its unnormalised output, the largest score and the sum of exponentials.
    """

    def _finish(self, partial: Partial, plan: PairPlan) -> torch.Tensor:
        return self._by_token(torch.cat(partial, dim=-1), plan)
