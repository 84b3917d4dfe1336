"""Steady decode: one attention group's packed plan, moved on by one token a request, in place.

It applies while the same requests decode, step after step. Nothing is planned again then: offsets grow by one, a
request that enters a block gets its id written, and one that enters a KV tile gets a pair at the end of the list, hung
into the merge tree behind the pairs it has. A plan made from scratch lists the pairs in another order and merges the
same ones in the same order.
"""

import numpy as np

from model_runner_base.attention.plan import FAN_IN, AttentionPlan, PlanGeometry


class SteadyPlan:
    """Views of one group's sections of the packed buffer, and what is needed to add to them. R requests, one tile each.

    Args:
        plan: the plan that was packed into ``views``, uniform decode.
        views: the packed sections by name.
        index: the group's number in those names.
    """

    def __init__(self, geometry: PlanGeometry, plan: AttentionPlan, views: dict[str, np.ndarray], index: int) -> None:
        self.geometry = geometry
        self.num_pairs = plan.num_pairs
        self._slot_blocks = views[f"slot_blocks.{index}"]
        self._slot_offsets = views[f"slot_offsets.{index}"][: plan.num_tiles]
        self._pair_tile = views[f"pair_tile.{index}"]
        self._pair_offset = views[f"pair_offset.{index}"]
        self._pair_blocks = views[f"pair_blocks.{index}"]
        self._trees = [views[f"tree.{index}.{level}"] for level in range(geometry.num_levels)]

        # For each level of the tree: how many of its children a request has, and which is the last of them.
        self._counts = [plan.pairs_per_tile.copy()]
        self._last = [np.cumsum(plan.pairs_per_tile) - 1]
        for _ in self._trees[1:]:
            self._counts.append(-(-self._counts[-1] // FAN_IN))
            self._last.append(np.cumsum(self._counts[-1]) - 1)
        self._num_nodes = [int(counts.sum()) for counts in self._counts[1:]]

    def advance(self, positions: np.ndarray, block_table: np.ndarray, rows: np.ndarray) -> bool:
        """Moves on to ``positions`` [R], one further than the last; ``rows`` [R] are those of ``block_table``.

        Returns False, and leaves the sections in disorder, if they have no room for the pairs that are needed.
        """
        block_size, blocks_per_tile = self.geometry.block_size, self.geometry.blocks_per_tile
        self._slot_offsets += 1
        self._pair_offset[: self.num_pairs] += 1
        entering = np.flatnonzero(self._slot_offsets == block_size)
        if not len(entering):
            return True
        block = positions[entering] // block_size
        block_ids = block_table[rows[entering], block]
        self._slot_offsets[entering] = 0
        self._slot_blocks[entering] = block_ids
        block_in_tile = block % blocks_per_tile
        tiles = entering[block_in_tile == 0]
        if len(tiles) and not self._enter_kv_tile(tiles):
            return False
        self._pair_blocks[self._last[0][entering], block_in_tile] = block_ids
        return True

    def _enter_kv_tile(self, tiles: np.ndarray) -> bool:
        """Gives each of ``tiles`` the pair of a KV tile whose first position it has just reached."""
        pairs = np.full(len(tiles), -1)
        if self.geometry.window is not None:
            # A pair that has fallen out of its request's window gives up its place.
            reach = self.geometry.window + self.geometry.kv_tile - 1
            fallen = np.flatnonzero(self._pair_offset[: self.num_pairs] >= reach)
            place_of = np.full(len(self._slot_offsets), -1)
            place_of[self._pair_tile[fallen]] = fallen
            pairs = place_of[tiles]
        is_new = pairs < 0
        num_new = np.count_nonzero(is_new)
        if self.num_pairs + num_new >= len(self._pair_offset):  # The last pair stays neutral.
            return False
        if num_new:
            pairs[is_new] = np.arange(self.num_pairs, self.num_pairs + num_new)
            self.num_pairs += num_new
            self._pair_tile[pairs] = tiles
            self._hang(tiles[is_new], pairs[is_new])
        self._pair_offset[pairs] = 0
        self._last[0][tiles] = pairs
        return True

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
