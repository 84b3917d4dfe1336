"""Contiguous cache: uniform decode over whole cache lines, without a gather of keys and values.

With ``block_size=max_model_len`` a request has one block, whose id is its cache line. A step of decode may then read
the front of all lines as one slice of the cache, each line as one pair with whatever token decodes there, and merge
nothing. Lines that nobody uses are read for nothing, and short contexts at the length of the longest: where that costs
more than the pairs of the plan, the step is packed as with a paged cache.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.attention.adapter import AttentionGroup, SteadySections
from model_runner_base.attention.loops import FAR
from model_runner_base.attention.paged import PagedAttentionMetadata
from model_runner_base.attention.plan import AttentionPlan
from model_runner_base.attention_metadata import PagedAttentionAdapter
from model_runner_base.graph_policy import WHOLE_LINES, GraphSize
from model_runner_base.input_batch import InputBatch, Section, pad_into


class ContiguousAdapter(PagedAttentionAdapter):
    """Metadata of a contiguous cache: by whole lines at sizes of that kind, else as of a paged one."""

    def needed_sizes(self, batch: InputBatch, plans: list[AttentionPlan]) -> list[GraphSize]:
        needs = super().needed_sizes(batch, plans)
        if batch.is_uniform_decode:
            lines, longest = self.limits.num_lines, -(-int(batch.seq_lens.max()) // self.limits.kv_tile)
            needs.append(GraphSize(WHOLE_LINES, batch.num_tokens, batch.num_reqs, lines, lines * longest))
        return needs

    def sections(self, size: GraphSize) -> list[Section]:
        if size.query_tile != WHOLE_LINES:
            return super().sections(size)
        sections = []
        for index in range(len(self.groups)):
            sections += [
                Section(f"token_lines.{index}", (size.num_tokens,)),
                Section(f"pair_tile.{index}", (size.num_tiles,)),
                Section(f"pair_start.{index}", (size.num_tiles,)),
            ]
        return sections

    def pack(
        self, batch: InputBatch, plans: list[AttentionPlan], size: GraphSize, views: dict[str, np.ndarray]
    ) -> None:
        if size.query_tile != WHOLE_LINES:
            return super().pack(batch, plans, size, views)
        for index, group in enumerate(self.groups):
            lines = lines_of(group, batch.rows)
            pad_into(views[f"token_lines.{index}"], lines, 0)
            # Lines that nobody decodes on keep the tokens of an earlier step: nothing sees them.
            views[f"pair_tile.{index}"][lines - 1] = np.arange(len(lines))
            views[f"pair_start.{index}"][:] = FAR
            views[f"pair_start.{index}"][lines - 1] = 0

    def steady_plans(
        self, batch: InputBatch, plans: list[AttentionPlan], size: GraphSize, views: dict[str, np.ndarray]
    ) -> Sequence[SteadySections] | None:
        if size.query_tile != WHOLE_LINES:
            return self._steady_pairs(batch, plans, views)
        context = size.num_pairs // size.num_tiles * self.limits.kv_tile
        room = context - int(batch.seq_lens.max())
        return [SteadyLines(room)]

    def build(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, PagedAttentionMetadata]:
        if size.query_tile != WHOLE_LINES:
            return super().build(size, arrays)
        metadata, positions = {}, arrays["positions"]
        for index, group in enumerate(self.groups):
            lines, pair_tile = arrays[f"token_lines.{index}"], arrays[f"pair_tile.{index}"]
            tile, pair_offset = group.geometry.kv_tile, positions[pair_tile] - arrays[f"pair_start.{index}"]
            group_metadata = PagedAttentionMetadata(
                geometry=group.geometry,
                slot_blocks=lines * group.block_table.parts + positions // tile,
                slot_offsets=positions % tile,
                pair_tile=pair_tile,
                pair_offset=pair_offset,
                pair_last=pair_offset,
                pair_blocks=None,
                merge_tree=[],
                token_slots=(lines - 1).clamp(min=0),
                line_tiles=size.num_pairs // size.num_tiles,
            )
            metadata.update(dict.fromkeys(group.layer_names, group_metadata))
        return metadata


def lines_of(group: AttentionGroup, rows: np.ndarray) -> np.ndarray:
    """The cache lines of requests, from 1 on: 0 is the null block."""
    return group.block_table.table[rows, 0] // group.block_table.parts


class SteadyLines:
    """A packed step by whole lines: all of it stands while the longest context fits, since lines never change."""

    def __init__(self, room: int) -> None:
        self._room = room
        """Further tokens that the longest request has room for."""

    def begin(self, increments: dict[str, np.ndarray]) -> None:
        """Nothing grows but positions."""

    def advance(self) -> bool:
        """Whether the packed size has room for one more token of the longest request."""
        self._room -= 1
        return self._room >= 0
