"""The block-sparse attention plan: which query tile meets which KV tile.

Attention is computed over (query tile, KV tile) pairs. A query tile is up to ``query_tile`` consecutive tokens of one
request, a KV tile ``kv_tile`` consecutive cache positions of the same request. Only pairs that overlap causally, and
lie inside the sliding window if there is one, are listed, so the work is proportional to the tokens that exist and
not to rows x longest context. The plan is a handful of int32 arrays built by NumPy on the host; padding it to a
captured size adds pairs that are masked everywhere.

A pair yields an unnormalised partial result with its running maximum and sum (the online-softmax state of
FlashAttention, arXiv:2205.14135). The partial results of a tile are merged by a tree of gathers with fixed fan-in, so
that no scatter, sort or loop is needed: level by level, a node merges ``FAN_IN`` nodes of the level below.
"""

from dataclasses import dataclass

import numpy as np

FAN_IN = 8
_LANES = np.arange(FAN_IN)
MASKED = -(1 << 30)
"""Offset that puts every position of a pair behind the causal mask."""


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


def kv_tile_for(block_size: int, target: int = 256) -> int:
    """The KV tile nearest below ``target`` that is a whole number of blocks."""
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
    kv_tile = geometry.kv_tile
    if query_tile == 1:
        tile_req = np.arange(len(query_len))
        tile_first = np.zeros_like(query_len)
        tile_len = query_len
    else:
        tiles_per_req = -(-query_len // query_tile)
        tile_req, tile_index = _repeat_with_index(tiles_per_req)
        tile_first = tile_index * query_tile
        tile_len = np.minimum(query_tile, query_len[tile_req] - tile_first)
    tile_position = num_computed[tile_req] + tile_first

    kv_end = (tile_position + tile_len - 1) // kv_tile + 1
    if geometry.window is None:
        pairs_per_tile, kv_begin = kv_end, None
    else:
        kv_begin = np.maximum(0, tile_position - geometry.window + 1) // kv_tile
        pairs_per_tile = kv_end - kv_begin
    pair_tile, pair_kv = _repeat_with_index(pairs_per_tile)
    if kv_begin is not None:
        pair_kv = pair_kv + kv_begin[pair_tile]

    tiled_table = block_table.reshape(len(block_table), -1, geometry.blocks_per_tile)
    return AttentionPlan(
        query_tile=query_tile,
        tile_start=query_start[tile_req] + tile_first,
        tile_len=tile_len,
        pairs_per_tile=pairs_per_tile,
        pair_tile=pair_tile,
        pair_offset=tile_position[pair_tile] - pair_kv * kv_tile,
        pair_blocks=tiled_table[rows[tile_req[pair_tile]], pair_kv],
    )


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
        # A node's children lie side by side.
        first, num_children = np.cumsum(counts) - counts, counts
        nodes_per_tile = np.ones_like(counts) if tree is trees[-1] else -(-counts // FAN_IN)
        if len(nodes_per_tile) and nodes_per_tile.max() > 1:
            tile, index = _repeat_with_index(nodes_per_tile)
            first, num_children = first[tile] + index * FAN_IN, counts[tile] - index * FAN_IN
        num_nodes = len(first)
        tree[:num_nodes] = np.where(num_children[:, None] > _LANES, first[:, None] + _LANES, neutral)
        tree[num_nodes:] = neutral
        counts, neutral = nodes_per_tile, len(tree) - 1


def _repeat_with_index(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 3): the owner (0, 0, 1, 1, 1) and the index within it (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, index
