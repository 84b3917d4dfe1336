"""Block tables: which KV-cache blocks hold a request's tokens, one table a KV-cache group, rows as in RequestStates."""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from model_runner_base.host_loops import compiled, int_array, put_ints


class BlockTable:
    """Block ids of every row of one KV-cache group.

    ``table`` is [max_num_reqs, max_blocks] int32. Entries past a row's ``num_blocks`` are leftovers: whoever reads them
    must mask what it finds there. Blocks are those of the cache tensors, of ``block_size`` tokens; each of the
    scheduler's is stored as ``parts`` of them, side by side.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, block_size: int, blocks_per_tile: int, parts: int = 1
    ) -> None:
        self.block_size = block_size
        self.parts = parts
        max_blocks = -(-max_model_len // block_size)
        # Whole KV tiles, so that a tile's block ids are one slice; and whole blocks of the scheduler's.
        whole = math.lcm(blocks_per_tile, parts)
        max_blocks = -(-max_blocks // whole) * whole
        self.table = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.has_changed = np.zeros(max_num_reqs, np.bool_)
        """[rows] set with every change; whoever keeps a copy of the table elsewhere clears it."""

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Sets all blocks of a row."""
        block_ids = self._stored(block_ids)
        put_ints(block_ids, self.table[row])
        self.num_blocks[row] = len(block_ids)
        self.has_changed[row] = True

    def append(self, rows: Sequence[int], block_ids: Sequence[list[int]]) -> None:
        """Adds blocks at the end of each of ``rows`` [R], which are distinct.

        Raises IndexError for a row that cannot hold them: the scheduler has gone beyond the model's length.
        """
        numbers = int_array([*rows, *map(len, block_ids), *chain.from_iterable(block_ids)])
        append_blocks(self.table, self.num_blocks, self.has_changed, numbers, len(rows), self.parts)

    def _stored(self, block_ids: list[int]) -> list[int]:
        """The scheduler's blocks as those of the cache tensors."""
        if self.parts == 1:
            return block_ids
        return [block_id * self.parts + part for block_id in block_ids for part in range(self.parts)]


@compiled
def append_blocks(
    table: np.ndarray,
    num_blocks: np.ndarray,
    has_changed: np.ndarray,
    numbers: np.ndarray,
    num_rows: int,
    parts: int,
) -> None:
    """``numbers`` are the rows, how many of the scheduler's blocks go behind what each has, and all these blocks."""
    rows, counts, block_ids = numbers[:num_rows], numbers[num_rows : 2 * num_rows], numbers[2 * num_rows :]
    first = 0
    for index in range(num_rows):
        row = rows[index]
        end = num_blocks[row]
        if end + counts[index] * parts > table.shape[1]:
            raise IndexError("a request has more blocks than its row of the block table can hold")
        for block in range(first, first + counts[index]):
            for part in range(parts):
                table[row, end] = block_ids[block] * parts + part
                end += 1
        first += counts[index]
        num_blocks[row] = end
        has_changed[row] = True
