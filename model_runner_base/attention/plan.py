"""The block-sparse attention plan: which query tile meets which KV tile.

Attention is computed over (query tile, KV tile) pairs. A query tile is up to ``query_tile`` consecutive tokens of one
request, a KV tile ``kv_tile`` consecutive cache positions of the same request. Only pairs that overlap causally, and
lie inside the sliding window if there is one, are listed, so the work is proportional to the tokens that exist and
not to rows x longest context. Counting them says which captured size the step needs; they are then listed right in
the packed buffer of that size, and what is left of it are pairs that are masked everywhere.

A pair yields an unnormalised partial result with its running maximum and sum (the online-softmax state of
FlashAttention, arXiv:2205.14135). The partial results of a tile are merged by a tree of gathers with fixed fan-in, so
that no scatter, sort or loop is needed: level by level, a node merges ``FAN_IN`` nodes of the level below.
"""

from dataclasses import dataclass

import numpy as np

from model_runner_base.attention.loops import FAN_IN, count_pairs


@dataclass(frozen=True)
class PlanGeometry:
    """What is fixed for one KV-cache group and window."""

    block_size: int
    kv_tile: int
    """Cache positions in a KV tile, a multiple of ``block_size``."""
    max_kv_tiles: int
    window: int | None = None
    """Sliding window in tokens: a query sees itself and ``window - 1`` tokens before it."""

    @property
    def blocks_per_tile(self) -> int:
        return self.kv_tile // self.block_size

    @property
    def num_levels(self) -> int:
        """Levels of the merge tree that the longest tile needs."""
        levels, reach = 1, FAN_IN
        while reach < self.max_kv_tiles:
            levels, reach = levels + 1, reach * FAN_IN
        return levels

    def level_sizes(self, num_tiles: int, num_pairs: int) -> list[int]:
        """Nodes of each level of the merge tree, from the one over the pairs to the one that holds the tiles.

        Each tile may leave one ragged node on an inner level, and the last node of a level is neutral.
        """
        sizes = []
        below = num_pairs
        for _ in range(self.num_levels - 1):
            below = below // FAN_IN + num_tiles + 1
            sizes.append(below)
        return [*sizes, num_tiles]


def kv_tile_for(block_size: int, target: int = 64) -> int:
    """The KV tile near ``target``: several blocks, or a whole part of a block that is larger.

    A request pays for whole tiles, so small ones suit short contexts; long ones cost the same with tiles of 64 and 256.
    Raises ValueError for a large block that has no such part.
    """
    if block_size <= target:
        return target // block_size * block_size
    # Kernels that ask for whole 128s multiply so many positions at a time.
    granule = 128 if target % 128 == 0 and block_size % 128 == 0 else 1
    parts = [size for size in range(granule, block_size + 1, granule) if block_size % size == 0]
    tile = min(parts, key=lambda size: max(size / target, target / size))
    if not target // 4 <= tile <= 4 * target:
        suitable = -(-block_size // target) * target
        raise ValueError(
            f"block_size={block_size} cannot be read in parts of {target // 4} to {4 * target} tokens: "
            f"use a multiple of {target}, such as {suitable}"
        )
    return tile


def stored_block_size(block_size: int, target: int) -> int:
    """Tokens in a block of the cache tensors: a block of the scheduler's that is larger than a KV tile is stored as so
    many tiles, side by side.
    """
    return min(block_size, kv_tile_for(block_size, target))


@dataclass
class AttentionPlan:
    """What a step needs room for, before padding; its pairs are listed when they are packed. NT query tiles."""

    query_tile: int
    pairs_per_tile: np.ndarray
    """[NT]"""
    num_pairs: int

    @property
    def num_tiles(self) -> int:
        return len(self.pairs_per_tile)


def make_plan(
    geometry: PlanGeometry, query_tile: int, query_len: np.ndarray, num_computed: np.ndarray
) -> AttentionPlan:
    """Plans a step.

    Args:
        query_tile: 1 if every request has one token, else the tile of mixed steps.
        query_len: [R] int64 tokens scheduled.
        num_computed: [R] int64 tokens in the cache before this step.
    """
    pairs = count_pairs(query_tile, geometry.kv_tile, geometry.window or 0, query_len, num_computed)
    return AttentionPlan(query_tile, *pairs)
