"""The cache block that the key of each of a step's own tokens goes to."""

import numpy as np
import torch

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import PairGeometry
from model_runner_base.host_loops import compiled
from model_runner_base.step.chunk_tiles import ChunkTiles
from model_runner_base.step.decode_rows import DecodeRows


def blocks_of_rows(rows: DecodeRows, ring: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R * Q] int32, the null block for what is no token; ``ring`` [R, N] as ``fill_ring`` has it."""
    if ring.shape[1] == 1:
        blocks = ring.expand_as(rows.positions)
    else:
        blocks = ring.gather(1, (rows.positions // block_size % ring.shape[1]).long())
    if rows.is_token is not None:
        blocks = torch.where(rows.is_token, blocks, 0)
    return blocks.reshape(-1)


def blocks_of_chunks(
    tiles: ChunkTiles, last_pair: torch.Tensor, plan: PairPlan, geometry: PairGeometry
) -> torch.Tensor:
    """[C] int32, the null block for padding; ``last_pair`` [NT] is each tile's.

    A tile's pairs lie side by side in the order of their keys.
    """
    tile = tiles.slots // tiles.query
    assert plan.pair_start is not None and plan.pair_blocks is not None
    last_kv_tile = plan.pair_start[last_pair] // geometry.kv_tile
    pair = last_pair[tile] - (last_kv_tile[tile] - tiles.positions // geometry.kv_tile)
    block = plan.pair_blocks[pair.clamp(min=0), tiles.positions % geometry.kv_tile // geometry.block_size]
    return torch.where(tiles.is_real, block, 0)


def ring_size(reach: int, block_size: int) -> int:
    """The most blocks that ``reach`` consecutive positions can touch."""
    return 1 + -(-(reach - 1) // block_size)


@compiled
def fill_ring(
    block_size: int,
    first: np.ndarray,
    stop: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    num_blocks: np.ndarray,
    ring: np.ndarray,
) -> None:
    """The blocks of positions from ``first`` to before ``stop`` [R]: block b of a row stands in place b % N of the
    row's ring [R, N] (padded), the null block where it has none.

    Example, with blocks of 16 and N = 2: positions 28 to 34 are in blocks 1 and 2 of a row that has [7, 9, 4]; its ring
    is [4, 9].
    """
    size = ring.shape[1]
    for index in range(len(rows)):
        row = rows[index]
        for place in range(size):
            ring[index, place] = 0
        for block in range(first[index] // block_size, (stop[index] - 1) // block_size + 1):
            if block < num_blocks[row]:
                ring[index, block % size] = table[row, block]
    ring[len(rows) :] = 0
