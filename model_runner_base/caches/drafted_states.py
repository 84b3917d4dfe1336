"""States of recurrent layers where drafts are verified: a wrong draft leaves no trace in a request's state.

A decode row has up to Q tokens, the last one that was sampled and the drafts after it. Its request has Q places for its
state, next to each other in the layers' tensors. The state after a request's first c tokens is at place c % Q. A row
whose first token is at position p reads the state after p tokens, and writes those after p + 1 to p + Q tokens. The
last of these takes the place of the one that was read, which no later step needs.

The next step begins after the last right draft, and the state that it reads is there, whichever draft that was. Its
position is known on the device (``DecodeRows``), also where the host has not read it yet. So the host sends the
request's index alone, and a repeated step sends nothing.

Example, Q = 4: a row at position 130 reads place 2 and writes places 3, 0, 1 and 2. Two of its three drafts are right,
so the next step is at position 133. It reads place 1, the state after 133 tokens, and writes places 2, 3, 0 and 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_runner_base.caches.states import ROWS, TILES, StateCaches
from model_runner_base.models.recurrent.step import RowSteps
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.call import ModelCall
from model_runner_base.step.device_tokens import DecodeRows
from model_runner_base.step.packing import Section, pad_into
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize

SOURCES = "chunk_tile_state_sources"
"""Section of the places that chunks read. Those of decode rows are worked out on the device."""


class DraftedStateCaches(StateCaches):
    """States of all recurrent layers, at ``limits.decode.query`` places for each request.

    The sections of chunks have places, since the host knows how far a prompt is. That of decode rows has the indices of
    requests, as the table has them.
    """

    def __init__(self, table: BlockTable, layer_names: Sequence[str], limits: StepLimits) -> None:
        super().__init__(table, layer_names, limits)
        self._num_places = limits.decode.query

    def sections(self, size: StepSize) -> list[Section]:
        sections = super().sections(size)
        return [*sections, *(section._replace(name=SOURCES) for section in sections if section.name == TILES)]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        states, rows = self._table.table[batch.rows, 0], batch.num_decodes
        pad_into(views[ROWS], states[:rows], 0)
        if size.kind == StepKind.MIXED:
            for section, counts in ((TILES, batch.seq_lens), (SOURCES, batch.num_computed)):
                self._fill_tiles(views[section], place_of(states, counts, self._num_places)[rows:], batch)

    def _rows(self, call: ModelCall, rows: DecodeRows) -> tuple[RowSteps, ...]:
        assert rows.is_token is not None, "rows where drafts are verified have several tokens"
        blocks, positions, num_places = call.arrays[ROWS], rows.positions, self._num_places
        sources = place_of(self._blocks_at(blocks, positions - 1), positions, num_places)
        # Tokens that are missing come last. What is computed for them goes to padding.
        written = place_of(self._blocks_at(blocks, positions), positions + 1, num_places)
        written = torch.where(rows.is_token, written, 0)
        return tuple(
            [RowSteps(written[:, token], sources[:, token], positions[:, token] > 0) for token in range(num_places)]
        )

    def _blocks_at(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Indices, [R, 1] or [R, Q], that the places of states after the tokens at ``positions`` [R, Q] belong to."""
        return blocks.unsqueeze(1)

    def _sources(self, call: ModelCall, section: str) -> torch.Tensor:
        return call.arrays[SOURCES]


def place_of(states: Any, counts: Any, num_places: int) -> Any:
    """Indices in the layers' tensors of the states after ``counts`` tokens, of requests with the indices ``states``.

    Both are arrays of NumPy, or tensors.
    """
    return states * num_places + counts % num_places
