"""States of recurrent layers where prefixes are kept: one state for each block of tokens, vLLM's cache mode "align".

The state in block ``b`` of a request is that after ``(b + 1) * block_size`` tokens, or after all tokens while the block
is not full. A step reads the state in the block of the last token before it, and writes that in the block of its own
last token. A prefix that is hit ends with a block, so the first step after it reads a state that stays as it is for
other requests, and nothing is ever copied. The blocks between the two get no state.

Example: blocks of 16 tokens. A request hits 32 tokens, and its next chunk has 20: it reads block 1 and writes block 3.
At positions 52 to 63 it decodes in block 3, which it reads and writes; at 64 it reads block 3 and writes block 4.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.caches.plan_updates import write
from model_runner_base.caches.states import ROWS, TILES, StateCaches, sections_of
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.sizes import StepSize

SOURCES = {ROWS: "decode_state_sources", TILES: "chunk_tile_state_sources"}
"""Sections of the states that are read, by the sections of those that are written."""


class KeptStateCaches(StateCaches):
    """States of all recurrent layers, one for each block of tokens that a request or a kept prefix ends in.

    The table has one entry for each block, the index of its state; 0 for a block without one.
    """

    def sections(self, size: StepSize) -> list[Section]:
        return [*super().sections(size), *sections_of(SOURCES[ROWS], SOURCES[TILES], size)]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        states = states_at(self._table, batch.rows, batch.seq_lens - 1)
        self._fill_states(ROWS, TILES, states, batch, size, views)
        sources = states_at(self._table, batch.rows, batch.num_computed - 1)
        self._fill_states(SOURCES[ROWS], SOURCES[TILES], sources, batch, size, views)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        return [KeptStateUpdates(self._table, batch.rows, step)]

    def _sources(self, call: ModelCall, section: str) -> torch.Tensor:
        return call.arrays[SOURCES[section]]


def states_at(table: BlockTable, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[R] index of the state in the block of each of R positions; of the first block for a position before 0."""
    return table.table[rows, np.maximum(positions, 0) // table.block_size]


class KeptStateUpdates:
    """Updates of both sections of decode rows while their step is repeated: where requests enter blocks, and one step
    later."""

    def __init__(self, table: BlockTable, rows: np.ndarray, step: PackedStep) -> None:
        self._table, self._rows, self._step = table, rows, step
        self._steps_to_change = 1

    def begin(self, positions: np.ndarray) -> None:
        self._steps_to_change = 1

    def follow(self, positions: np.ndarray) -> bool:
        self._steps_to_change -= 1
        if self._steps_to_change:
            return True
        self._write(ROWS, positions)
        self._write(SOURCES[ROWS], positions - 1)
        # A request that has just entered its block reads the one before, and its own in the next step.
        entered, size = positions % self._table.block_size, self._table.block_size
        self._steps_to_change = int(np.where(entered, size - entered, 1).min())
        return True

    def _write(self, section: str, positions: np.ndarray) -> None:
        states, step = states_at(self._table, self._rows, positions), self._step
        view = step.views[section][: len(states)]
        for row in np.flatnonzero(view != states).tolist():
            write(step.buffer, step.entries.array, step.entries.count, step.offsets[section] + row, int(states[row]))
