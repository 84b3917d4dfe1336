"""States of recurrent layers: a kind of cache that holds what a layer knows of a request, however long it is.

The scheduler numbers states by a group of its own (scheduling/state_group.py), which is the last of a request's blocks.
A request's states lie at two coordinates:

- **The block.** As a rule a request has one block. Where prefixes are kept it has one for each block of tokens (vLLM's
  cache mode "align"): the state after c tokens is in the block of the last of them. A prefix that is hit ends with a
  block, so the first step after it reads a state that stays as it is for other requests, and nothing is ever copied.
- **The place.** As a rule a block has one place. Where drafts are verified it has Q, as many as a decode row has
  tokens: the state after c tokens is at place c % Q. A row whose first token is at position p reads the state after p
  tokens, and writes those after p + 1 to p + Q tokens. The last of these takes the place of the one that was read,
  which no later step needs. The next step begins after the last right draft, and the state that it reads is there,
  whichever draft that was. A wrong draft is overwritten by the right token at its position, in the same block and at
  the same place.

The device knows a row's position (``DecodeRows``), also where the host has not read it yet, and works out both. The
host sends the blocks of all positions that a row may touch, as a ring (``fill_ring`` in caches/paged.py). So a repeated
step sends something only where a request may enter a block. Of chunks the host knows all, and sends the indices. A
request at position 0 reads zeros, whatever the last owner of its state left there.

Example, Q = 4, blocks of 16 tokens: a row at position 30 reads place 2 of block 1. It writes places 3 and 0 of block 1,
and places 1 and 2 of block 2. Its first draft is right and the second is not, so the next step is at position 32: it
reads place 0 of block 1, the state after 32 tokens, and writes to block 2 alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from vllm.config import VllmConfig

from model_runner_base.caches.group import CacheKind, ModelCaches, OwnTensors
from model_runner_base.caches.paged import fill_ring, ring_size
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.recurrent.layers import is_plain, state_tensors
from model_runner_base.models.recurrent.step import DecodeSteps, RecurrentStep, TileSteps
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import DecodeRows, ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.packing import Changes, PackedStep, Section, pad_into, write_entry
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.trace import LayerTrace
from model_runner_base.vllm_compat.types.recurrent import (
    has_states,
    keeps_prefixes,
    num_places,
    num_states,
    recurrent_layers,
)

BLOCKS = "decode_state_blocks"
"""Section of the rings of decode rows."""
STATES, SOURCES = "chunk_tile_states", "chunk_tile_state_sources"
"""Sections of the states that chunks write, and that they read; the second is left out where they are the same."""


def plain_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Recurrent layers by name, if all run in plain torch; else none."""
    layers = recurrent_layers(vllm_config)
    return layers if all(map(is_plain, layers.values())) else {}


def check_compatible(model: ModelCaches, layers: Mapping[str, Any], is_planned: bool) -> None:
    """Raises UnsupportedConfigError unless recurrent ``layers`` can be in one model with its attention layers: the base
    plans all of them (``is_planned``), or vLLM's metadata builders do."""
    if layers and not has_states(model.vllm_config):
        raise UnsupportedConfigError(f"layer {next(iter(layers))} keeps a state, but the model is not a hybrid one")
    if layers and any(group.reads_plans != is_planned for group in model.groups):
        raise UnsupportedConfigError(
            "recurrent layers with vLLM's kernels need vLLM's attention in all other layers, and those in plain torch "
            "the base's own: choose one for all layers"
        )


def states_table(model: ModelCaches) -> BlockTable:
    """Makes the table of which request has which states; the scheduler's last group is theirs."""
    limits, config = model.limits, model.vllm_config
    block_size = config.cache_config.block_size if keeps_prefixes(config) else limits.max_model_len
    return BlockTable(limits.max_num_reqs, limits.max_model_len, block_size, 1)


def tensors_of(layers: Mapping[str, Any], vllm_config: VllmConfig) -> list[OwnTensors]:
    """States of recurrent ``layers``, each of which has its own."""
    return [
        OwnTensors([name], [((num_places(vllm_config), *shape), dtype) for shape, dtype in state_tensors(layer)])
        for name, layer in layers.items()
    ]


def states_memory(vllm_config: VllmConfig) -> int:
    """Bytes of the states of recurrent layers, which no block of the KV cache holds."""
    tensors = tensors_of(recurrent_layers(vllm_config), vllm_config)
    return sum(math.prod(shape) * dtype.itemsize for own in tensors for shape, dtype in own.forms)


def check_states_fit(vllm_config: VllmConfig) -> None:
    """Raises ValueError where ``kv_cache_memory_bytes`` is no more than the states of recurrent layers take."""
    taken = states_memory(vllm_config)
    asked = vllm_config.cache_config.kv_cache_memory_bytes if taken else None
    if asked and taken >= asked:
        remedies = "lower max_num_seqs" + (", or leave out enable_prefix_caching" * keeps_prefixes(vllm_config))
        if vllm_config.speculative_config is not None:
            remedies += " or num_speculative_tokens"
        raise ValueError(
            f"{num_states(vllm_config)} states of recurrent layers take {taken} bytes, and kv_cache_memory_bytes is "
            f"{asked}: raise it, or {remedies}"
        )


class StateCaches(CacheKind):
    """States of all recurrent layers; a request has the same indices in each.

    Args:
        table: the blocks of each row; its block size is the model length where a request has one block.
        layer_names: recurrent layers.
    """

    def __init__(self, table: BlockTable, layer_names: Sequence[str], limits: StepLimits) -> None:
        self._table, self._layer_names, self._limits = table, layer_names, limits
        self.tables = [table]
        self._num_places = limits.decode.query
        self._has_one_block = table.block_size >= limits.max_model_len
        # The state that is read belongs to the position before the row's first one.
        reach = 1 + limits.unread + self._num_places
        self._ring = 1 if self._has_one_block else ring_size(reach, table.block_size)
        self._stays = self._has_one_block and self._num_places == 1
        """Whether a step writes a request's state to where it has read it."""

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        layers = plain_layers(model.vllm_config)
        check_compatible(model, layers, is_planned=True)
        return cls(states_table(model), list(layers), model.limits) if layers else None

    @classmethod
    def own_tensors(cls, vllm_config: VllmConfig, kv_tile_target: int) -> list[OwnTensors]:
        return tensors_of(plain_layers(vllm_config), vllm_config)

    def sections(self, size: StepSize) -> list[Section]:
        dims = size.plan_dims()
        sections = [Section(BLOCKS, (dims.decode_rows, self._ring))]
        if size.kind == StepKind.MIXED:
            sections += [
                Section(name, (dims.chunk_tiles,)) for name in ((STATES,) if self._stays else (STATES, SOURCES))
            ]
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        rows = batch.num_decodes
        fill_rings(self._table, self._limits.unread, batch.num_computed[:rows], batch, views[BLOCKS])
        if size.kind == StepKind.MIXED:
            self._fill_tiles(views[STATES], batch.seq_lens[rows:], batch)
            if not self._stays:
                self._fill_tiles(views[SOURCES], batch.num_computed[rows:], batch)

    def _fill_tiles(self, view: np.ndarray, counts: np.ndarray, batch: InputBatch) -> None:
        """Writes the states after ``counts`` tokens of the requests with a chunk, one number for each tile."""
        rows = batch.num_decodes
        states = place_of(block_at(self._table, batch.rows[rows:], counts - 1), counts, self._num_places)
        num_tiles = -(-batch.query_len[rows:] // self._limits.chunk.query)
        pad_into(view, np.repeat(states, num_tiles), 0)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater] | None:
        return () if self._has_one_block else [RingUpdates(self._table, self._limits, batch, step)]

    def bind(self, call: ModelCall) -> None:
        assert call.decode_rows is not None, "states are read in the layout of rows and tiles"
        tiles = None
        if call.tiles is not None:
            sources = call.arrays[STATES if self._stays else SOURCES]
            tiles = TileSteps.of(call.tiles, call.arrays[STATES], sources)
        step = RecurrentStep(self._rows(call, call.decode_rows), tiles)
        call.metadata.update(dict.fromkeys(self._layer_names, step))

    def bind_rows(self, call: ModelCall) -> None:
        """Does nothing: no layer of a draft model is recurrent."""

    def _rows(self, call: ModelCall, rows: DecodeRows) -> tuple[DecodeSteps, ...]:
        """States that each token of the decode rows reads and writes."""
        blocks, positions, num_places = call.arrays[BLOCKS], rows.positions, self._num_places
        if self._stays:
            return (DecodeSteps(blocks[:, 0], blocks[:, 0], positions[:, 0] > 0),)
        sources = place_of(self._blocks_at(blocks, positions - 1), positions, num_places)
        written = place_of(self._blocks_at(blocks, positions), positions + 1, num_places)
        if rows.is_token is not None:
            # Tokens that are missing come last. What is computed for them goes to padding.
            written = torch.where(rows.is_token, written, 0)
        return tuple(
            [DecodeSteps(written[:, token], sources[:, token], positions[:, token] > 0) for token in range(num_places)]
        )

    def _blocks_at(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, Q] block of each of the ``positions`` [R, Q]; the first block for one before 0."""
        if self._ring == 1:
            return blocks.expand_as(positions)
        return blocks.gather(1, (positions.clamp(min=0) // self._table.block_size % self._ring).long())

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}


def block_at(table: BlockTable, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[R] block of each of R positions; the first block for a position before 0."""
    return table.table[rows, np.maximum(positions, 0) // table.block_size]


def place_of(blocks: Any, counts: Any, num_places: int) -> Any:
    """Indices in the layers' tensors of the states after ``counts`` tokens, in these ``blocks``.

    Both are arrays of NumPy, or tensors.
    """
    return blocks if num_places == 1 else blocks * num_places + counts % num_places


def fill_rings(table: BlockTable, unread: int, positions: np.ndarray, batch: InputBatch, rings: np.ndarray) -> None:
    """Writes the blocks that decode rows may read or write, if their positions are ``positions`` [R] or up to
    ``unread`` before them."""
    num_rows = len(positions)
    first = np.maximum(positions - unread - 1, 0)
    stop = positions + batch.query_len[:num_rows]
    fill_ring(table.block_size, first, stop, batch.rows[:num_rows], table.table, table.num_blocks, rings)


class RingUpdates:
    """Updates of the rows' rings while their step is repeated, made where a row may enter a block."""

    def __init__(self, table: BlockTable, limits: StepLimits, batch: InputBatch, step: PackedStep) -> None:
        self._table, self._unread, self._query = table, limits.unread, limits.decode.query
        self._batch, self._step = batch, step
        self._steps_to_entry = 1

    def begin(self, positions: np.ndarray) -> None:
        self._steps_to_entry = 1

    def advance(self, positions: np.ndarray) -> bool:
        self._steps_to_entry -= 1
        if self._steps_to_entry:
            return True
        step, size = self._step, self._table.block_size
        sent = step.views[BLOCKS]
        rings = np.empty_like(sent)
        fill_rings(self._table, self._unread, positions, self._batch, rings)
        changes, begin = Changes.of(step), step.offsets[BLOCKS]
        for place in np.flatnonzero(rings != sent).tolist():
            write_entry(changes, begin + place, int(rings.flat[place]))
        # Positions move on by as many tokens as a row has, at most.
        left = size - (positions + self._query - 1) % size
        self._steps_to_entry = -(-int(left.min()) // self._query)
        return True
