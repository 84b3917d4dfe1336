"""Block-sparse attention plan: which query tile meets which KV tile.

Attention is computed over (query tile, KV tile) pairs. A query tile is up to ``tiling.query`` consecutive tokens of one
request, a KV tile ``tiling.keys`` consecutive cache positions of the same request. Only pairs that hold a key that a
token of the query tile sees are listed. So the work is proportional to the tokens that exist, and not to the number of
rows times the longest context. First the pairs are counted, which gives the size that the step needs. Then they are
listed in the packed buffer of the size that the step runs at. Padding pairs are masked.

Example: KV tiles of 64 positions, a request in decode at position 130. Its query tile is one token; its pairs are KV
tiles 0, 1 and 2, of which the last holds three keys that the token sees.

A pair yields an unnormalised partial result with its running maximum and sum (the online-softmax state of
FlashAttention, arXiv:2205.14135). In plain torch each result is added to that of the pair's query tile
(attention/pieces.py). A plan also has a merge tree, which leads from a query tile's pairs to the tile: level by level,
a node has up to ``FAN_IN`` children of the level below. Chunks take their maxima by it, and kernels may merge results
by it, without a scatter or a sort.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from model_runner_base.attention.key_range import CAUSAL, KeyRange
from model_runner_base.attention.loops import FAN_IN, count_pairs


@dataclass(frozen=True)
class PairGeometry:
    """Fixed sizes of the pairs of one KV-cache group with one key range: of its decode rows, or of its chunks."""

    block_size: int
    query_tile: int
    kv_tile: int
    """Number of cache positions in a KV tile, a multiple of ``block_size``."""
    max_kv_tiles: int
    key_range: KeyRange = CAUSAL

    @property
    def blocks_per_tile(self) -> int:
        return self.kv_tile // self.block_size

    @property
    def num_levels(self) -> int:
        """Number of levels of the merge tree that the longest request needs."""
        levels, num_merged = 1, FAN_IN
        while num_merged < self.max_kv_tiles:
            levels, num_merged = levels + 1, num_merged * FAN_IN
        return levels

    def level_sizes(self, num_tiles: int, num_pairs: int) -> list[int]:
        """Number of nodes on each level of the merge tree, from the one above the pairs to the one that holds the
        tiles.

        Each query tile may have one partly filled node on an inner level. The last node of a level is neutral: it adds
        nothing, and padding points to it.
        """
        sizes = []
        below = num_pairs
        for _ in range(self.num_levels - 1):
            below = below // FAN_IN + num_tiles + 1
            sizes.append(below)
        return [*sizes, num_tiles]

    def count(
        self,
        query_len: np.ndarray,
        num_computed: np.ndarray,
        num_tokens: int,
        spans: tuple[np.ndarray, np.ndarray],
    ) -> "PairCount":
        """Counts the pairs of requests that have ``query_len`` [R] int64 new tokens, after ``num_computed`` [R] int64
        tokens in the cache.

        ``num_tokens`` is the sum of ``query_len``. ``spans`` are the first and last position of each token's span,
        int32, or empty.
        """
        per_tile = np.empty(num_tokens // self.query_tile + len(query_len), np.int64)  # A last tile may be ragged.
        tile, key_range = self.query_tile, self.key_range
        num_tiles, num_pairs = count_pairs(tile, self.kv_tile, *key_range, query_len, num_computed, *spans, per_tile)
        return PairCount(per_tile[:num_tiles], num_pairs)


class PairCount(NamedTuple):
    """Number of pairs of a step's NT query tiles, before padding."""

    per_tile: np.ndarray
    """[NT] number of pairs of each query tile."""
    num_pairs: int

    @property
    def num_tiles(self) -> int:
        return len(self.per_tile)


def kv_tile_for(block_size: int, target: int = 64, least: int = 1) -> int:
    """Size of a KV tile near ``target`` and no less than ``least``: some blocks, or an integer fraction of a block.

    A request pays for whole tiles, so small tiles suit short contexts. Long contexts cost the same with tiles of 64 and
    256. Raises ValueError for a large block that has no such fraction.
    """
    if block_size <= target:
        return max(target // block_size, -(-least // block_size)) * block_size
    # A kernel whose tiles are multiples of 128 multiplies 128 positions at a time.
    granule = 128 if target % 128 == 0 and block_size % 128 == 0 else 1
    parts = [size for size in range(granule, block_size + 1, granule) if block_size % size == 0 and size >= least]
    tile = min(parts, key=lambda size: max(size / target, target / size))
    if not target // 4 <= tile <= 4 * target:
        suitable = -(-block_size // target) * target
        raise ValueError(
            f"block_size={block_size} cannot be read in parts of {target // 4} to {4 * target} tokens: "
            f"use a multiple of {target}, such as {suitable}"
        )
    return tile


def stored_block_size(block_size: int, target: int, least: int = 1) -> int:
    """Number of tokens in a block of the cache tensors.

    If a block of the scheduler is larger than a KV tile, it is stored as consecutive blocks of one tile each.
    """
    return min(block_size, kv_tile_for(block_size, target, least))
