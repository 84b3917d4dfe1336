"""Block tables: the KV-cache blocks of each request, a table for each KV-cache group, rows as in ``RequestStates``."""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from model_runner_base.step.host_loops import compiled, int_array, put_ints


class BlockTable:
    """Block ids of every row of one KV-cache group.

    ``table`` is [max_num_reqs, max_blocks] int32. Entries after a row's ``num_blocks`` are leftovers; code that reads
    them must mask the result. Blocks are those of the cache tensors, of ``block_size`` tokens. Each of the scheduler's
    blocks is stored as ``parts`` consecutive ones.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, block_size: int, blocks_per_tile: int, parts: int = 1
    ) -> None:
        self.block_size = block_size
        self.parts = parts
        max_blocks = -(-max_model_len // block_size)
        # A row holds whole KV tiles, so that a tile's block ids are one slice, and whole blocks of the scheduler's.
        whole = math.lcm(blocks_per_tile, parts)
        self.max_blocks = -(-max_blocks // whole) * whole
        self.table = np.zeros((max_num_reqs, self.max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.has_changed = np.zeros(max_num_reqs, np.bool_)
        """[rows] whether each row has changed; code that keeps a copy of the table clears it."""

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Sets all blocks of a row."""
        block_ids = self._stored(block_ids)
        put_ints(block_ids, self.table[row])
        self.num_blocks[row] = len(block_ids)
        self.has_changed[row] = True

    def append(self, rows: Sequence[int], block_ids: Sequence[list[int]]) -> None:
        """Adds blocks at the end of each of ``rows`` [R], which are distinct.

        Raises IndexError for a row that cannot hold them, because the scheduler has exceeded the model's length.
        """
        numbers = int_array([*rows, *map(len, block_ids), *chain.from_iterable(block_ids)])
        append_blocks(self.table, self.num_blocks, self.has_changed, numbers, len(rows), self.parts)

    def _stored(self, block_ids: list[int]) -> list[int]:
        """Blocks of the cache tensors that hold the scheduler's ``block_ids``."""
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
    """Appends blocks to rows. ``numbers`` are the rows, the number of the scheduler's blocks for each, and these
    blocks."""
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
