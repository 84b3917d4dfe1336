"""Decode rows on the device: where their tokens are, and where the keys of those go.

A row has Q tokens at consecutive positions, of which the first ones count. Q is 1, or 1 + k where k drafts are
verified. The host packs a row's plan for every position that it may turn out to be at; the graph takes the positions
themselves from ``DeviceRows``.
"""

from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.host_loops import compiled
from model_runner_base.requests.device_rows import known_or
from model_runner_base.step.call import ModelCall

LENGTHS = "decode_lengths"


class DecodeRows(NamedTuple):
    """R rows, Q tokens a row."""

    positions: torch.Tensor
    """[R, Q]"""
    is_token: torch.Tensor | None = None
    """[R, Q] bool; None: every row has Q, and what padding rows have does no harm."""

    @classmethod
    def of(cls, call: ModelCall, starts: torch.Tensor, query: int) -> "DecodeRows":
        """Those of a step; ``starts`` [R] as they were packed."""
        starts = known_or(starts, call.computed).unsqueeze(1)
        if query == 1:
            return cls(starts)
        index = torch.arange(query, dtype=torch.int32, device=starts.device)
        return cls(starts + index, index < call.arrays[LENGTHS].unsqueeze(1))

    def own_blocks(self, ring: torch.Tensor, block_size: int) -> torch.Tensor:
        """[R * Q] the block that each token's key goes to, the null block of what is none; ``ring`` as ``fill_ring``
        has it."""
        if ring.shape[1] == 1:
            blocks = ring.expand_as(self.positions)
        else:
            blocks = ring.gather(1, (self.positions // block_size % ring.shape[1]).long())
        if self.is_token is not None:
            blocks = torch.where(self.is_token, blocks, 0)
        return blocks.reshape(-1)


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
