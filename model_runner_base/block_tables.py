"""Block tables: which KV-cache blocks hold a request's tokens, one table a KV-cache group, rows as in RequestStates."""

from collections.abc import Sequence
from itertools import chain

import numpy as np


class BlockTable:
    """Block ids of every row of one KV-cache group.

    ``table`` is [max_num_reqs, max_blocks] int32. Entries past a row's ``num_blocks`` are leftovers: whoever reads them
    must mask what it finds there.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, blocks_per_tile: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # Whole KV tiles, so that a tile's block ids are one slice.
        max_blocks = -(-max_blocks // blocks_per_tile) * blocks_per_tile
        self.table = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.has_changed = np.zeros(max_num_reqs, np.bool_)
        """[rows] set with every change; whoever keeps a copy of the table elsewhere clears it."""

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Sets all blocks of a row."""
        self.table[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        self.has_changed[row] = True

    def append(self, rows: np.ndarray, block_ids: Sequence[list[int]]) -> None:
        """Adds blocks at the end of each of ``rows``, which are distinct."""
        flat = list(chain.from_iterable(block_ids))
        start = self.num_blocks[rows]
        self.has_changed[rows] = True
        if len(flat) == len(rows) and all(block_ids):  # Decode: one block each.
            self.table[rows, start] = flat
            self.num_blocks[rows] = start + 1
            return
        counts = np.fromiter(map(len, block_ids), np.int64, len(block_ids))
        first = np.cumsum(counts) - counts
        index = np.arange(len(flat)) + np.repeat(start - first, counts)
        self.table[np.repeat(rows, counts), index] = flat
        self.num_blocks[rows] = start + counts
