"""Block tables: which KV-cache blocks hold a request's tokens, one table a KV-cache group, rows as in RequestStates."""

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

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Sets all blocks of a row."""
        self.table[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Adds blocks at the end of a row."""
        start = self.num_blocks[row]
        self.table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)
