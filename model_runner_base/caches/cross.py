"""Cross-attention: every token sees its request's whole encoder output, which lies in blocks of its own.

The keys and values of an encoder's output are written once, before the request's first step
(inputs/multimodal/cross.py), and no step adds to them. So there is nothing to plan: each decode row, and each tile of a
chunk, meets all KV tiles of its request, in their order. A step sends the blocks; the graph lists the pairs, which
follow from the step's size. While a step is repeated nothing of this changes.

Example: an encoder output of 150 keys in blocks of 32 and KV tiles of 64. "a" has blocks 7, 3, 4, 8 and 9. Its decode
row has pairs of (7, 3), (4, 8) and (9, null), in the last of which it sees 22 keys. A row of padding has null blocks,
and sees nothing; so does a request without an encoder input.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import group_traces
from model_runner_base.caches.spans import NO_SPANS
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import STARTS, ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.trace import LayerTrace

ROW_BLOCKS, TILE_BLOCKS = "cross_row_blocks", "cross_tile_blocks"


class CrossCaches(CacheKind):
    """Groups of cross-attention layers; the model's self-attention layers belong to another kind."""

    reads = (STARTS,)

    def __init__(self, groups: Sequence[AttentionGroup], limits: StepLimits) -> None:
        self._groups = groups
        self._limits = limits

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        if not model.limits.cross_len:
            return None
        if model.spans is not NO_SPANS or not all(group.reads_plans for group in model.groups):
            raise UnsupportedConfigError("cross-attention needs the base's own attention, and causal self-attention")
        groups = [group for group in model.groups if group.cross_len]
        return cls(groups, model.limits) if groups else None

    # ---- On the host ----

    def sections(self, size: StepSize) -> list[Section]:
        dims = size.plan_dims()
        sections: list[Section] = []
        for index, group in enumerate(self._groups):
            width = group.block_table.max_blocks  # A number: graphs are traced through this, and guard arrays.
            sections.append(Section(f"{ROW_BLOCKS}.{index}", (dims.decode_rows, width)))
            if size.kind == StepKind.MIXED:
                sections.append(Section(f"{TILE_BLOCKS}.{index}", (dims.chunk_tiles, width)))
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        decodes = batch.num_decodes
        for index, group in enumerate(self._groups):
            _fill_blocks(group.block_table, batch.rows[:decodes], views[f"{ROW_BLOCKS}.{index}"])
            if size.kind == StepKind.MIXED:
                tiles = -(-batch.query_len[decodes:] // self._limits.chunk.query)
                rows = batch.rows[decodes:].repeat(tiles)
                _fill_blocks(group.block_table, rows, views[f"{TILE_BLOCKS}.{index}"])

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        """Returns nothing: sections stay as they are while a step is repeated."""
        return ()

    # ---- On the device ----

    def bind(self, call: ModelCall) -> None:
        rows, tiles = call.decode_rows, call.tiles
        assert rows is not None
        nowhere = torch.zeros_like(call.positions)
        every_place = torch.ones_like(rows.positions, dtype=torch.bool)
        for index, group in enumerate(self._groups):
            chunks = None
            if tiles is not None:
                tile_blocks = call.arrays[f"{TILE_BLOCKS}.{index}"]
                chunks = _plan(group, group.chunk_kv_tile, tile_blocks, tiles.is_token)
                chunks.tile_tokens, chunks.tile_slots = tiles.tokens, tiles.slots
                chunks.piece = self._limits.chunk_pairs_at_once(group.chunk_kv_tile)
            decode = _plan(group, group.kv_tile, call.arrays[f"{ROW_BLOCKS}.{index}"], every_place)
            decode.piece = self._limits.decode_pairs_at_once(group.kv_tile)
            metadata = PagedAttentionMetadata(
                slot_blocks=nowhere,
                slot_offsets=nowhere,
                num_decode_tokens=rows.positions.numel(),
                decode=decode,
                chunks=chunks,
            )
            call.metadata.update(dict.fromkeys(group.layer_names, metadata))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        self.bind(call)
        return group_traces(self._groups, call)


def _fill_blocks(table: BlockTable, rows: np.ndarray, view: np.ndarray) -> None:
    """Writes the blocks of each of ``rows`` [R], and null blocks for padding and for requests without blocks."""
    view[: len(rows)] = table.table[rows]
    view[: len(rows)][table.num_blocks[rows] == 0] = 0
    view[len(rows) :] = 0


def _plan(group: AttentionGroup, kv_tile: int, blocks: torch.Tensor, is_token: torch.Tensor) -> PairPlan:
    """Plan of NT tiles with ``blocks`` [NT, B], whose queries are tokens where ``is_token`` [NT, Q] is true."""
    block_size, num_tiles, device = group.block_table.block_size, blocks.shape[0], blocks.device
    num_kv_tiles, blocks_per_tile = -(-group.cross_len // kv_tile), kv_tile // block_size
    tile, kv_start = (torch.arange(count, dtype=torch.int32, device=device) for count in (num_tiles, num_kv_tiles))
    kv_start = kv_start * kv_tile
    last = torch.where(is_token & (blocks[:, :1] > 0), group.cross_len - 1, NEVER).to(torch.int32)
    last = last.unsqueeze(1) - kv_start.view(1, -1, 1)
    pairs = torch.arange(num_tiles * num_kv_tiles, dtype=torch.int32, device=device)
    return PairPlan(
        block_size=block_size,
        kv_tile=kv_tile,
        pair_tile=tile.unsqueeze(1).expand(-1, num_kv_tiles).reshape(-1),
        pair_start=kv_start.unsqueeze(0).expand(num_tiles, -1).reshape(-1),
        pair_blocks=blocks[:, : num_kv_tiles * blocks_per_tile].reshape(-1, blocks_per_tile),
        last=last.flatten(0, 1),
        first=None,
        merge_tree=[pairs.view(num_tiles, num_kv_tiles)],
    )
