"""States of recurrent layers: a kind of cache with one entry a request, however long it is.

The scheduler numbers states by a group of its own (scheduling/state_group.py), which is the last of a
request's blocks. A request's state stays where it is for as long as the request runs: a repeated step sends nothing.
Where prefixes are kept (caches/kept_states.py) or drafts are verified (caches/drafted_states.py), a request has more
states.
A request at position 0 reads zeros, whatever the last owner of its state left there.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.caches.group import CacheKind
from model_runner_base.models.recurrent.step import RecurrentStep, RowSteps, TileSteps
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.device_tokens import DecodeRows
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.trace import LayerTrace

ROWS, TILES = "decode_states", "chunk_tile_states"


class StateCaches(CacheKind):
    """States of all recurrent layers; a request has the same index in each.

    Args:
        table: one entry a row, the request's index.
        layer_names: recurrent layers.
    """

    def __init__(self, table: BlockTable, layer_names: Sequence[str], limits: StepLimits) -> None:
        self._table, self._layer_names, self._limits = table, layer_names, limits

    def sections(self, size: StepSize) -> list[Section]:
        return sections_of(ROWS, TILES, size)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        states = self._table.table[batch.rows, 0]
        self._fill_states(ROWS, TILES, states, batch, size, views)

    def _fill_states(
        self,
        rows: str,
        tiles: str,
        states: np.ndarray,
        batch: InputBatch,
        size: StepSize,
        views: dict[str, np.ndarray],
    ) -> None:
        """Writes the ``states`` [R] of R requests to the sections ``rows`` and ``tiles``."""
        pad_into(views[rows], states[: batch.num_decodes], 0)
        if size.kind == StepKind.MIXED:
            self._fill_tiles(views[tiles], states[batch.num_decodes :], batch)

    def _fill_tiles(self, view: np.ndarray, states: np.ndarray, batch: InputBatch) -> None:
        """Writes the ``states`` of the requests with a chunk to a section with one number for each tile."""
        num_tiles = -(-batch.query_len[batch.num_decodes :] // self._limits.chunk.query)
        pad_into(view, np.repeat(states, num_tiles), 0)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        return ()

    def bind(self, call: ModelCall) -> None:
        assert call.rows is not None, "states are read in the layout of rows and tiles"
        tiles = None
        if call.tiles is not None:
            tiles = TileSteps.of(call.tiles, call.arrays[TILES], self._sources(call, TILES))
        step = RecurrentStep(self._rows(call, call.rows), tiles)
        call.metadata.update(dict.fromkeys(self._layer_names, step))

    def bind_rows(self, call: ModelCall) -> None:
        """Does nothing: no layer of a draft model is recurrent."""

    def _rows(self, call: ModelCall, rows: DecodeRows) -> tuple[RowSteps, ...]:
        """The states of the decode rows."""
        return (RowSteps(call.arrays[ROWS], self._sources(call, ROWS), rows.positions[:, 0] > 0),)

    def _sources(self, call: ModelCall, section: str) -> torch.Tensor:
        """Indices of the states that are read, in the order of those in ``section``, which are written."""
        return call.arrays[section]

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}


def sections_of(rows: str, tiles: str, size: StepSize) -> list[Section]:
    """Section ``rows``, one number for each decode row; in a step with chunks also ``tiles``, one for each tile."""
    num_rows, _, _, num_tiles, _ = size.plan_dims()
    sections = [Section(rows, (num_rows,))]
    if size.kind == StepKind.MIXED:
        sections.append(Section(tiles, (num_tiles,)))
    return sections
