"""The attention adapter of devices without attention kernels: a block-sparse plan for plain torch."""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.attention.adapter import AttentionAdapter, AttentionGroup, SteadySections
from model_runner_base.attention.loops import FAN_IN, FAR, fill_group, fill_merge_tree, fill_node_starts, fill_tiles
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
                Section(f"pair_tile.{index}", (num_pairs,)),
                Section(f"pair_start.{index}", (num_pairs,)),
                Section(f"pair_blocks.{index}", (num_pairs, group.geometry.blocks_per_tile)),
            ]
            for level, nodes in enumerate(group.geometry.level_sizes(num_tiles, num_pairs)):
                # The children of each node; in mixed steps, whose plans are never added to, where they start.
                shape = (nodes, FAN_IN) if query_tile == 1 else (nodes + 1,)
                sections.append(Section(f"tree.{index}.{level}", shape))
        if query_tile != 1:
            sections += [Section("tile_starts", (num_tiles + 1,)), Section("token_slots", (num_tokens,))]
        return sections

    def pack(
        self,
        batch: InputBatch,
        plans: list[AttentionPlan],
        size: GraphSize,
        views: dict[str, np.ndarray],
    ) -> None:
        """Fills this adapter's sections. Padding tokens are written to the null block, nothing sees padding pairs."""
        for index, (group, plan) in enumerate(zip(self.groups, plans, strict=True)):
            geometry = group.geometry
            fill_group(
                geometry.block_size,
                size.query_tile,
                geometry.kv_tile,
                geometry.window or 0,
                batch.query_len,
                batch.num_computed,
                batch.rows,
                group.block_table.table,
                views[f"slot_blocks.{index}"],
                views[f"pair_tile.{index}"],
                views[f"pair_start.{index}"],
                views[f"pair_blocks.{index}"],
            )
            trees = tuple(views[f"tree.{index}.{level}"] for level in range(geometry.num_levels))
            if size.query_tile == 1:
                fill_merge_tree(trees, plan.pairs_per_tile, size.num_pairs)
            else:
                fill_node_starts(trees, plan.pairs_per_tile)
        if size.query_tile != 1:
            # All groups have the same tiles.
            fill_tiles(size.query_tile, batch.query_len, views["tile_starts"], views["token_slots"])

    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """What of these sections is not zero in a step of nothing but padding."""
        for name, view in views.items():
            if name.startswith("pair_start."):
                view[:] = FAR

    def build(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, PagedAttentionMetadata]:
        """Metadata by layer name, from the unpacked sections: what the device can work out is not sent."""
        positions, starts = arrays["positions"], arrays.get("tile_starts")
        # In decode a tile is a token, its first and its last.
        tile_tokens, first, length = None, positions, None
        if starts is not None:
            index_in_tile = torch.arange(size.query_tile, dtype=torch.int32, device=starts.device)
            # Behind a tile's last token come those of the next, which are computed here for nothing.
            tile_tokens = (starts[:-1, None] + index_in_tile).clamp(max=size.num_tokens - 1)
            first = positions[tile_tokens[:, 0]]
            length = starts[1:] - starts[:-1]
        metadata = {}
        for index, group in enumerate(self.groups):
            pair_tile, pair_start = arrays[f"pair_tile.{index}"], arrays[f"pair_start.{index}"]
            pair_offset = pair_last = first[pair_tile] - pair_start
            trees = [arrays[f"tree.{index}.{level}"] for level in range(group.geometry.num_levels)]
            if length is not None:
                pair_last = pair_offset + length[pair_tile] - 1
                trees = node_children(trees, size.num_pairs)
            group_metadata = PagedAttentionMetadata(
                geometry=group.geometry,
                slot_blocks=arrays[f"slot_blocks.{index}"],
                slot_offsets=positions % group.geometry.block_size,
                pair_tile=pair_tile,
                pair_offset=pair_offset,
                pair_last=pair_last,
                pair_blocks=arrays[f"pair_blocks.{index}"],
                merge_tree=trees,
                tile_tokens=tile_tokens,
                token_slots=arrays.get("token_slots"),
            )
            metadata.update(dict.fromkeys(group.layer_names, group_metadata))
        return metadata


def node_children(levels: list[torch.Tensor], num_pairs: int) -> list[torch.Tensor]:
    """The merge tree, each level [nodes, FAN_IN], from where the children of each node start, [nodes + 1]."""
    trees, num_below = [], num_pairs
    for starts in levels:
        children = starts[:-1, None] + torch.arange(FAN_IN, dtype=torch.int32, device=starts.device)
        trees.append(torch.where(children < starts[1:, None], children, num_below - 1))
        num_below = len(starts) - 1
    return trees
