"""Metadata of attention over a plan: where keys and values are written, and which of them each token sees.

The kinds of caches make it inside the step's graph (caches/paged.py, caches/contiguous.py).
attention/paged.py reads it, as do a device's own kernels in its place.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from vllm.v1.attention.backend import AttentionMetadata

NEVER = -(1 << 29)
"""Last position seen by a query that is no token: it sees nothing."""


@dataclass
class PairPlan:
    """Pairs of decode rows, or of chunk tiles, on the device. All int32, sizes padded.

    P pairs, NT tiles of Q query tokens, B blocks in a KV tile. A query of a pair sees the keys of the KV tile from
    ``first`` to ``last``, which are counted from the KV tile's start and may lie outside of it.
    """

    block_size: int
    kv_tile: int
    pair_tile: torch.Tensor
    """[P] query tile of each pair."""
    pair_start: torch.Tensor | None
    """[P] first position of each pair's KV tile, ``FAR`` for padding; None: 0 for all."""
    pair_blocks: torch.Tensor | None
    """[P, B] cache blocks of each pair's KV tile; None if pair i is the front of cache line i, whatever its length
    (caches/contiguous.py)."""
    last: torch.Tensor
    """[P, Q] last key that each query sees; in causal attention its own position. Negative if it sees no key of the
    tile."""
    first: torch.Tensor | None
    """[P, Q] first key that each query sees; None if every query sees from its request's first token on."""
    merge_tree: list[torch.Tensor]
    """Levels of the merge tree, [nodes, FAN_IN] each; none where ``pair_blocks`` is None."""
    tile_tokens: torch.Tensor | None = None
    """[NT, Q] tokens of each tile, counted from the plan's first token; arbitrary after a tile's last token. None: tile
    i has the tokens from i * Q on."""
    tile_slots: torch.Tensor | None = None
    """[C] place of each token's output in the flattened tiles; None: tokens are in the tiles' order."""
    line_tiles: int = 0
    """Number of KV tiles that are read at the front of each cache line, where ``pair_blocks`` is None."""
    piece: int = 0
    """Largest number of pairs that attention in plain torch holds at a time (attention/pieces.py); 0: all of them."""
    chosen: torch.Tensor | None = None
    """Keys up to ``last`` that each query sees: [NT, Q, C] positions, sorted (attention/choice.py), or
    [NT, Q, K, C] numbers of blocks for each KV head (attention/block_choice.py). None: all."""

    @cached_property
    def longest(self) -> int:
        """Largest number of positions up to the last one that a query sees, of a plan that is read at once
        (step/rounds.py): computed for the first layer of a step that asks."""
        assert self.pair_start is not None
        last = torch.where(self.last >= 0, self.pair_start.unsqueeze(1) + self.last, -1)
        return int(last.amax()) + 1

    @property
    def is_one_piece(self) -> bool:
        """Whether all pairs may be held at a time."""
        return not self.piece or self.pair_tile.shape[0] <= self.piece

    @property
    def entries(self) -> torch.Tensor:
        """[P * S] int32 entries of the cache, counted over all blocks, that hold the KV tiles of S positions.

        A position that no query of the pair sees is replaced by the nearest one that a query sees. So what other
        requests left in the cache is never read, not even a NaN. A pair that sees nothing has arbitrary entries.
        """
        assert self.pair_blocks is not None
        device = self.pair_blocks.device
        offset = torch.arange(self.block_size, dtype=torch.int32, device=device)
        entries = (self.pair_blocks.unsqueeze(2) * self.block_size + offset).flatten(1)
        position = torch.arange(self.kv_tile, dtype=torch.int32, device=device)
        position = torch.minimum(position, self.pair_last.clamp(min=0).unsqueeze(1))
        first = self.pair_first
        if first is not None:
            position = torch.maximum(position, first.clamp(max=self.kv_tile - 1).unsqueeze(1))
        return entries.gather(1, position.long()).flatten()

    @property
    def is_seen(self) -> torch.Tensor:
        """[P, S] bool: the positions of each pair's KV tile, or front of a line, from the first that any of its queries
        sees to the last."""
        num_positions = self.kv_tile * max(1, self.line_tiles)
        position = torch.arange(num_positions, dtype=torch.int32, device=self.last.device).unsqueeze(0)
        is_seen = position <= self.pair_last.unsqueeze(1)
        first = self.pair_first
        return is_seen if first is None else is_seen & (position >= first.unsqueeze(1))

    @property
    def pair_last(self) -> torch.Tensor:
        """[P] last key that any query of the pair sees; keys after it may belong to other requests."""
        return self.last.amax(dim=1)

    @property
    def pair_first(self) -> torch.Tensor | None:
        """[P] first key that any query of the pair sees; None as for ``first``."""
        return None if self.first is None else self.first.amin(dim=1)


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """Destinations of a step's keys and values, and the keys that its tokens see, on the device. All int32, sizes
    padded.

    The first ``num_decode_tokens`` of the T tokens are decode rows, and the rest are tokens of chunks.
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
