"""Cache blocks that the keys of a step's own tokens are written to."""

import numpy as np
import torch

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import PairGeometry
from model_runner_base.step.call import ChunkTiles, DecodeRows
from model_runner_base.step.host_loops import compiled


def blocks_of_rows(rows: DecodeRows, ring: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R * Q] int32 block of each place of decode rows, the null block where there is no token.

    ``ring`` [R, N] is as ``fill_ring`` writes it.
    """
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
    """[C] int32 block of each token of chunks, the null block for padding; ``last_pair`` [NT] is each tile's last pair.

    A tile's pairs follow each other in the order of their keys.
    """
    tile = tiles.slots // tiles.query
    assert plan.pair_start is not None and plan.pair_blocks is not None
    last_kv_tile = plan.pair_start[last_pair] // geometry.kv_tile
    pair = last_pair[tile] - (last_kv_tile[tile] - tiles.positions // geometry.kv_tile)
    block = plan.pair_blocks[pair.clamp(min=0), tiles.positions % geometry.kv_tile // geometry.block_size]
    return torch.where(tiles.is_real, block, 0)


def ring_size(reach: int, block_size: int) -> int:
    """Largest number of blocks that ``reach`` consecutive positions can touch."""
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
    """Writes the blocks of positions from ``first`` [R] to before ``stop`` [R] to a ring for each row, [R, N], padded.

    Block b of a row is at place b % N of its ring; places without a block hold the null block.

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
