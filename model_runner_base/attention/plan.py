"""The block-sparse attention plan: which query tile meets which KV tile.

Attention is computed over (query tile, KV tile) pairs. A query tile is up to ``query_tile`` consecutive tokens of one
request, a KV tile ``kv_tile`` consecutive cache positions of the same request. Only pairs that overlap causally, and
lie inside the sliding window if there is one, are listed, so the work is proportional to the tokens that exist and
not to rows x longest context. The plan is a handful of int32 arrays built on the host; padding it to a
captured size adds pairs that are masked everywhere.

A pair yields an unnormalised partial result with its running maximum and sum (the online-softmax state of
FlashAttention, arXiv:2205.14135). The partial results of a tile are merged by a tree of gathers with fixed fan-in, so
that no scatter, sort or loop is needed: level by level, a node merges ``FAN_IN`` nodes of the level below.
"""

from dataclasses import dataclass

import numpy as np

from model_runner_base.attention.loops import FAN_IN, fill_level, list_pairs


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
    """The KV tile nearest below ``target`` that is a whole number of blocks, at least one."""
    return block_size * max(1, target // block_size)


@dataclass
class AttentionPlan:
    """The plan of one step, unpadded. T tokens, NT query tiles, NP pairs, B blocks a KV tile."""

    query_tile: int
    tile_start: np.ndarray
    """[NT] index of a tile's first token in the batch."""
    tile_len: np.ndarray
    """[NT] tokens of a tile."""
    pairs_per_tile: np.ndarray
    """[NT]"""
    pair_tile: np.ndarray
    """[NP] the query tile of a pair."""
    pair_offset: np.ndarray
    """[NP] position of the tile's first token, counted from the start of the pair's KV tile."""
    pair_blocks: np.ndarray
    """[NP, B] block ids of the pair's KV tile; entries past the sequence are leftovers, masked by ``pair_offset``."""

    @property
    def num_tiles(self) -> int:
        return len(self.tile_start)

    @property
    def num_pairs(self) -> int:
        return len(self.pair_tile)


def make_plan(
    geometry: PlanGeometry,
    query_tile: int,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    block_table: np.ndarray,
    rows: np.ndarray,
) -> AttentionPlan:
    """Plans a step.

    Args:
        query_tile: 1 if every request has one token, else the tile of mixed steps.
        query_start: [R] index of each request's first token in the batch.
        query_len: [R] tokens scheduled.
        num_computed: [R] tokens in the cache before this step.
        block_table: [rows, blocks] int32.
        rows: [R] block-table row of each request.
    """
    tiled_table = block_table.reshape(len(block_table), -1, geometry.blocks_per_tile)
    arrays = list_pairs(
        query_tile, geometry.kv_tile, geometry.window or 0, query_start, query_len, num_computed, rows, tiled_table
    )
    return AttentionPlan(query_tile, *arrays)


def fill_merge_tree(trees: list[np.ndarray], pairs_per_tile: np.ndarray, num_pairs: int) -> None:
    """Fills the merge tree: for each level an array [nodes, FAN_IN] int32 of node indices of the level below.

    The last index of every level is a neutral node, to which all padding points.

    Args:
        trees: padded, as long as ``PlanGeometry.level_sizes`` says.
        num_pairs: padded number of pairs.
    """
    counts = pairs_per_tile
    neutral = num_pairs - 1
    for tree in trees:
        counts = fill_level(tree, counts, neutral)
        neutral = len(tree) - 1
