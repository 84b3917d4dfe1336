"""Steady decode: one attention group's packed plan, kept up as requests enter blocks and KV tiles.

Nothing is planned again: a request that enters a block gets its id written, and one that enters a KV tile gets a pair
at the end of the list, hung into the merge tree behind the pairs it has. A plan made from scratch lists the pairs in
another order and merges the same ones in the same order.
"""

from dataclasses import dataclass

import numpy as np

from model_runner_base.attention.plan import FAN_IN, AttentionPlan, PlanGeometry


@dataclass
class Phase:
    """The requests that enter a block in the same step, and where each is."""

    tiles: np.ndarray
    entries: np.ndarray
    """Flat index into the block table of the block that a request is in."""
    cells: np.ndarray
    """Flat index into ``pair_blocks`` of the same block."""


class SteadyPlan:
    """Views of one group's sections of the packed buffer, and what is needed to add to them. R requests, one tile each.

    Args:
        plan: the plan that was packed into ``views``, uniform decode.
        block_table: [rows, blocks], of the group.
        positions, rows: [R] where the requests are, and their rows in ``block_table``.
        views: the packed sections by name.
        index: the group's number in those names.
    """

    def __init__(
        self,
        geometry: PlanGeometry,
        plan: AttentionPlan,
        block_table: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        views: dict[str, np.ndarray],
        index: int,
    ) -> None:
        self.geometry = geometry
        self.num_pairs = plan.num_pairs
        self._plan = plan
        self._block_table = block_table
        self._positions = positions
        self._rows = rows
        self._index = index
        self._slot_blocks = views[f"slot_blocks.{index}"]
        self._slot_offsets = views[f"slot_offsets.{index}"][: plan.num_tiles]
        self._pair_tile = views[f"pair_tile.{index}"]
        self._pair_offset = views[f"pair_offset.{index}"]
        self._pair_blocks = views[f"pair_blocks.{index}"]
        self._trees = [views[f"tree.{index}.{level}"] for level in range(geometry.num_levels)]

    def begin(self, increments: dict[str, np.ndarray]) -> None:
        """Marks what grows in ``increments``, views by name, and counts the tree that ``make_plan`` made."""
        increments[f"slot_offsets.{self._index}"][: len(self._slot_offsets)] = 1
        self._pair_increments = increments[f"pair_offset.{self._index}"]
        self._pair_increments[: self.num_pairs] = 1
        # For each level of the tree: how many of its children a request has, and which is the last of them.
        self._counts = [self._plan.pairs_per_tile.copy()]
        self._last = [np.cumsum(self._plan.pairs_per_tile) - 1]
        for _ in self._trees[1:]:
            self._counts.append(-(-self._counts[-1] // FAN_IN))
            self._last.append(np.cumsum(self._counts[-1]) - 1)
        self._num_nodes = [int(counts.sum()) for counts in self._counts[1:]]
        # Who enters a block in the same step does so ever after.
        self._phases = [self._make_phase(offset) for offset in range(self.geometry.block_size)]
        self._step = 0

    def _make_phase(self, offset: int) -> Phase | None:
        tiles = np.flatnonzero(self._slot_offsets == offset)
        if not len(tiles):
            return None
        block = self._positions[tiles] // self.geometry.block_size
        blocks_per_tile = self.geometry.blocks_per_tile
        return Phase(
            tiles,
            entries=self._rows[tiles] * self._block_table.shape[1] + block,
            cells=self._last[0][tiles] * blocks_per_tile + block % blocks_per_tile,
        )

    def advance(self) -> bool:
        """Follows the growing sections, which have been moved on by one token a request.

        Returns False, and leaves the sections in disorder, if they have no room for the pairs that are needed.
        """
        self._step += 1
        phase = self._phases[-self._step % self.geometry.block_size]
        return phase is None or self._enter_blocks(phase)

    def _enter_blocks(self, phase: Phase) -> bool:
        """Looks up the blocks of the requests that have just reached the first position of one."""
        phase.entries += 1
        phase.cells += 1
        block_in_tile = phase.cells % self.geometry.blocks_per_tile
        if not block_in_tile.all():  # 0: the pair that came before is full.
            first = np.flatnonzero(block_in_tile == 0)
            pairs = self._enter_kv_tiles(phase.tiles[first])
            if pairs is None:
                return False
            phase.cells[first] = pairs * self.geometry.blocks_per_tile
        block_ids = self._block_table.take(phase.entries)
        self._slot_offsets.put(phase.tiles, 0)
        self._slot_blocks.put(phase.tiles, block_ids)
        self._pair_blocks.put(phase.cells, block_ids)
        return True

    def _enter_kv_tiles(self, tiles: np.ndarray) -> np.ndarray | None:
        """Pairs of the KV tile whose first position each of ``tiles`` has just reached; None if there is no room."""
        if self.geometry.window is None:
            return self._add_pairs(tiles)
        pairs = self._fallen_pairs(tiles)
        self._pair_offset[pairs[pairs >= 0]] = 0
        added = self._add_pairs(tiles[pairs < 0])
        if added is not None:
            pairs[pairs < 0] = added
        return None if added is None else pairs

    def _fallen_pairs(self, tiles: np.ndarray) -> np.ndarray:
        """For each of ``tiles`` a pair that fell out of its window and gives up its place; -1 if there is none."""
        reach = self.geometry.window + self.geometry.kv_tile - 1  # type: ignore[operator]
        fallen = np.flatnonzero(self._pair_offset[: self.num_pairs] >= reach)
        pair_of = np.full(len(self._slot_offsets), -1)
        pair_of[self._pair_tile[fallen]] = fallen
        return pair_of[tiles]

    def _add_pairs(self, tiles: np.ndarray) -> np.ndarray | None:
        start, stop = self.num_pairs, self.num_pairs + len(tiles)
        if stop >= len(self._pair_offset):  # The last pair stays neutral.
            return None
        self.num_pairs = stop
        self._pair_tile[start:stop] = tiles
        self._pair_offset[start:stop] = 0
        self._pair_increments[start:stop] = 1
        pairs = np.arange(start, stop)
        self._hang(tiles, pairs)
        return pairs

    def _hang(self, tiles: np.ndarray, children: np.ndarray) -> None:
        """Adds one child a tile to the lowest level of the tree, and the nodes above that this takes."""
        for level, tree in enumerate(self._trees):
            counts, last = self._counts[level], self._last[level]
            place = counts[tiles] % FAN_IN
            counts[tiles] += 1
            last[tiles] = children
            if level == len(self._trees) - 1:
                tree[tiles, place] = children
                return
            # A full node, or none, is followed by a new one, which the next level has to take in.
            is_first = place == 0
            num_new = np.count_nonzero(is_first)
            nodes = self._last[level + 1][tiles]
            nodes[is_first] = np.arange(self._num_nodes[level], self._num_nodes[level] + num_new)
            self._num_nodes[level] += num_new
            tree[nodes, place] = children
            tiles, children = tiles[is_first], nodes[is_first]
            if not num_new:
                return
