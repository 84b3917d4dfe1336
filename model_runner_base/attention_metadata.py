"""The attention adapter of devices without attention kernels: a block-sparse plan for plain torch."""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.attention.adapter import AttentionAdapter, AttentionGroup, SteadySections
from model_runner_base.attention.loops import FAN_IN, MASKED, fill_group, fill_tiles
from model_runner_base.attention.paged import PagedAttentionMetadata
from model_runner_base.attention.plan import AttentionPlan, make_plan
from model_runner_base.attention.steady import SteadyPlan
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import InputBatch, Section


class PagedAttentionAdapter(AttentionAdapter):
    """Plans and metadata for every attention group of the model."""

    def __init__(self, groups: list[AttentionGroup], limits: StepLimits) -> None:
        self.groups = groups
        self.limits = limits

    def plan(self, batch: InputBatch) -> list[AttentionPlan]:
        """One plan a group; all have the same query tiles."""
        query_tile = 1 if batch.is_uniform_decode else self.limits.query_tile
        return [make_plan(group.geometry, query_tile, batch.query_len, batch.num_computed) for group in self.groups]

    def steady_plans(
        self, batch: InputBatch, plans: list[AttentionPlan], size: GraphSize, views: dict[str, np.ndarray]
    ) -> Sequence[SteadySections] | None:
        """What keeps the packed ``plans`` of a step of pure decode up while it is repeated.

        None has every step built from scratch: so it is where a subclass packs in its own way, until it also says here
        how that moves on.
        """
        if type(self).pack is not PagedAttentionAdapter.pack:
            return None
        return self._steady_pairs(batch, plans, views)

    def _steady_pairs(
        self, batch: InputBatch, plans: list[AttentionPlan], views: dict[str, np.ndarray]
    ) -> list[SteadyPlan]:
        return [
            SteadyPlan(group.geometry, plan, group.block_table.table, batch.rows, views, index)
            for index, (group, plan) in enumerate(zip(self.groups, plans, strict=True))
        ]

    def needed_sizes(self, batch: InputBatch, plans: list[AttentionPlan]) -> list[GraphSize]:
        """The size of this step before padding, for each way it can be run; one pair stays neutral."""
        num_pairs = max((plan.num_pairs for plan in plans), default=0)
        num_tiles = max((plan.num_tiles for plan in plans), default=0)
        query_tile = plans[0].query_tile if plans else self.limits.query_tile
        return [GraphSize(query_tile, batch.num_tokens, batch.num_reqs, num_tiles, num_pairs + 1)]

    def sections(self, size: GraphSize) -> list[Section]:
        query_tile, num_tokens, _, num_tiles, num_pairs = size
        sections = []
        for index, group in enumerate(self.groups):
            sections += [
                Section(f"slot_blocks.{index}", (num_tokens,)),
                Section(f"slot_offsets.{index}", (num_tokens,), grows=True),
                Section(f"pair_tile.{index}", (num_pairs,)),
                Section(f"pair_offset.{index}", (num_pairs,), grows=True),
                Section(f"pair_blocks.{index}", (num_pairs, group.geometry.blocks_per_tile)),
            ]
            if query_tile != 1:
                sections.append(Section(f"pair_last.{index}", (num_pairs,)))
            levels = group.geometry.level_sizes(num_tiles, num_pairs)
            sections += [Section(f"tree.{index}.{level}", (nodes, FAN_IN)) for level, nodes in enumerate(levels)]
        if query_tile != 1:
            sections += [Section("tile_tokens", (num_tiles, query_tile)), Section("token_slots", (num_tokens,))]
        return sections

    def pack(
        self,
        batch: InputBatch,
        plans: list[AttentionPlan],
        size: GraphSize,
        views: dict[str, np.ndarray],
    ) -> None:
        """Fills this adapter's sections. Padding tokens are written to the null block, padding pairs see nothing."""
        for index, (group, plan) in enumerate(zip(self.groups, plans, strict=True)):
            geometry, offsets = group.geometry, views[f"pair_offset.{index}"]
            fill_group(
                geometry.block_size,
                size.query_tile,
                geometry.kv_tile,
                geometry.window or 0,
                batch.query_len,
                batch.num_computed,
                batch.rows,
                group.block_table.table,
                plan.pairs_per_tile,
                (views[f"slot_blocks.{index}"], views[f"slot_offsets.{index}"]),
                # In decode a tile's first token is its last.
                (views[f"pair_tile.{index}"], offsets, views.get(f"pair_last.{index}", offsets)),
                views[f"pair_blocks.{index}"],
                tuple(views[f"tree.{index}.{level}"] for level in range(geometry.num_levels)),
            )
        if size.query_tile != 1:
            # All groups have the same tiles.
            fill_tiles(size.query_tile, batch.query_len, views["tile_tokens"], views["token_slots"])

    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """What of these sections is not zero in a step of nothing but padding."""
        for name, view in views.items():
            if name.startswith(("pair_offset.", "pair_last.")):
                view[:] = MASKED

    def build(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, PagedAttentionMetadata]:
        """Metadata by layer name, from the unpacked sections."""
        metadata = {}
        for index, group in enumerate(self.groups):
            group_metadata = PagedAttentionMetadata(
                geometry=group.geometry,
                slot_blocks=arrays[f"slot_blocks.{index}"],
                slot_offsets=arrays[f"slot_offsets.{index}"],
                pair_tile=arrays[f"pair_tile.{index}"],
                pair_offset=arrays[f"pair_offset.{index}"],
                pair_last=arrays.get(f"pair_last.{index}", arrays[f"pair_offset.{index}"]),
                pair_blocks=arrays[f"pair_blocks.{index}"],
                merge_tree=[arrays[f"tree.{index}.{level}"] for level in range(group.geometry.num_levels)],
                tile_tokens=arrays.get("tile_tokens"),
                token_slots=arrays.get("token_slots"),
            )
            for layer_name in group.layer_names:
                metadata[layer_name] = group_metadata
        return metadata
