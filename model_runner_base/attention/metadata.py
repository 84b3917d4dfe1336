"""Metadata of attention over a plan: where keys and values are written, and which of them each token sees.

The kinds of caches make it inside the step's graph (caches/paged.py, caches/contiguous_decode.py).
attention/paged.py reads it, as do the kernels by which a device replaces that.
"""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionMetadata

NEVER = -(1 << 29)
"""The last position that a query sees which is none."""


@dataclass
class PairPlan:
    """The pairs of decode rows, or of chunk tiles, on the device. All int32, sizes padded.

    P pairs, NT tiles of Q query tokens, B blocks in a KV tile. A query of a pair sees the keys of the KV tile from
    ``first`` to ``last``, which are counted from the KV tile's start and may lie outside of it.
    """

    block_size: int
    kv_tile: int
    pair_tile: torch.Tensor
    """[P]"""
    pair_start: torch.Tensor | None
    """[P] the first position of each pair's KV tile, of padding ``FAR``; None: 0 for all."""
    pair_blocks: torch.Tensor | None
    """[P, B]; None if pair i is the front of cache line i, whatever its length (caches/contiguous_decode.py)."""
    last: torch.Tensor
    """[P, Q] of each query; causally it is the query's own position. Negative for what sees nothing of the tile."""
    first: torch.Tensor | None
    """[P, Q]; None if every query sees from its request's first token on."""
    merge_tree: list[torch.Tensor]
    """[nodes, FAN_IN] a level"""
    tile_tokens: torch.Tensor | None = None
    """[NT, Q] the tokens of each tile, counted from the plan's first, any behind a tile's last; None: tile i has the
    tokens from i * Q on."""
    token_slots: torch.Tensor | None = None
    """Where each token's output lies in the flattened tiles; None: in the tiles' order."""
    line_tiles: int = 0
    """KV tiles at the front of each cache line that are read, where ``pair_blocks`` is None."""

    @property
    def pair_last(self) -> torch.Tensor:
        """[P] the last key that any query of the pair sees; what lies behind it is not the request's."""
        return self.last.amax(dim=1)

    @property
    def pair_first(self) -> torch.Tensor | None:
        """[P] the first key that any query of the pair sees."""
        return None if self.first is None else self.first.amin(dim=1)


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """Where a step's keys and values go, and what its tokens see, on the device. All int32, sizes padded.

    The first ``num_decode_tokens`` of the T tokens are decode rows, those behind them are of chunks.
    """

    slot_blocks: torch.Tensor
    """[T] cache block that each token is written to."""
    slot_offsets: torch.Tensor
    """[T] offset in that block."""
    num_decode_tokens: int
    decode: PairPlan | None
    chunks: PairPlan | None

    @property
    def block_size(self) -> int:
        plan = self.decode or self.chunks
        assert plan is not None
        return plan.block_size
