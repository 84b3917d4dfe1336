"""States of recurrent layers where prefixes are kept and drafts are verified: some places for each block of tokens.

The state after c tokens is in the block of the last of them, as in caches/kept_states.py, and there at place c % Q, as
in caches/drafted_states.py. So a wrong draft is overwritten by the right token at its position, in the same block and
at the same place. A block is kept once all of its tokens are known, and then no request goes back into it: the state
after its last token stays as it is.

A row's tokens may lie in two blocks, and under asynchronous scheduling the host knows its position only to within the
drafts that were not read yet. The host sends the blocks of all positions that the row may touch, as a ring
(caches/own_blocks.py), and the device looks up which ones the row does touch.

Example, Q = 4, blocks of 16 tokens: a row at position 30 reads place 2 of block 1. It writes places 3 and 0 of block 1,
and places 1 and 2 of block 2. Its first draft is right and the second is not, so the next step is at position 32: it
reads place 0 of block 1, the state after 32 tokens, and writes to block 2 alone.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.caches.drafted_states import SOURCES, DraftedStateCaches, place_of
from model_runner_base.caches.kept_states import states_at
from model_runner_base.caches.own_blocks import fill_ring, ring_size
from model_runner_base.caches.plan_updates import write
from model_runner_base.caches.states import ROWS, TILES
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize


class KeptDraftedStateCaches(DraftedStateCaches):
    """States of all recurrent layers, at ``limits.decode.query`` places for each block of tokens.

    The table has one entry for each block. The section of decode rows has a ring of them for each row.
    """

    def __init__(self, table: BlockTable, layer_names: Sequence[str], limits: StepLimits) -> None:
        super().__init__(table, layer_names, limits)
        # The state that is read belongs to the position before the row's first one.
        self._ring = ring_size(1 + limits.unread + limits.decode.query, table.block_size)

    def sections(self, size: StepSize) -> list[Section]:
        return [
            section._replace(shape=(*section.shape, self._ring)) if section.name == ROWS else section
            for section in super().sections(size)
        ]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        rows = batch.num_decodes
        fill_rings(self._table, self._limits.unread, batch.num_computed[:rows], batch, views[ROWS])
        if size.kind == StepKind.MIXED:
            for section, counts in ((TILES, batch.seq_lens), (SOURCES, batch.num_computed)):
                states = states_at(self._table, batch.rows, counts - 1)
                self._fill_tiles(views[section], place_of(states, counts, self._num_places)[rows:], batch)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        return [RingUpdates(self._table, self._limits, batch, step)]

    def _blocks_at(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, Q] index of the block of each of the ``positions`` [R, Q]; of the first block for one before 0."""
        if self._ring == 1:
            return blocks.expand_as(positions)
        return blocks.gather(1, (positions.clamp(min=0) // self._table.block_size % self._ring).long())


def fill_rings(table: BlockTable, unread: int, positions: np.ndarray, batch: InputBatch, rings: np.ndarray) -> None:
    """Writes the blocks that decode rows may read or write, if their positions are ``positions`` [R] or up to
    ``unread`` before them."""
    rows = len(positions)
    first = np.maximum(positions - unread - 1, 0)
    stop = positions + batch.query_len[:rows]
    fill_ring(table.block_size, first, stop, batch.rows[:rows], table.table, table.num_blocks, rings)


class RingUpdates:
    """Updates of the rows' rings while their step is repeated, made where a row may enter a block."""

    def __init__(self, table: BlockTable, limits: StepLimits, batch: InputBatch, step: PackedStep) -> None:
        self._table, self._unread, self._query = table, limits.unread, limits.decode.query
        self._batch, self._step = batch, step
        self._steps_to_entry = 1

    def begin(self, positions: np.ndarray) -> None:
        self._steps_to_entry = 1

    def follow(self, positions: np.ndarray) -> bool:
        self._steps_to_entry -= 1
        if self._steps_to_entry:
            return True
        step, size = self._step, self._table.block_size
        sent = step.views[ROWS]
        rings = np.empty_like(sent)
        fill_rings(self._table, self._unread, positions, self._batch, rings)
        entries, begin = step.entries, step.offsets[ROWS]
        for place in np.flatnonzero(rings != sent).tolist():
            write(step.buffer, entries.array, entries.count, begin + place, int(rings.flat[place]))
        # Positions move on by as many tokens as a row has, at most.
        left = size - (positions + self._query - 1) % size
        self._steps_to_entry = -(-int(left.min()) // self._query)
        return True
