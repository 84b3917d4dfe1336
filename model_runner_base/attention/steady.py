"""Steady decode: one attention group's packed plan, kept up as requests enter blocks and KV tiles.

Nothing is planned again: a request that enters a block gets its id written, and one that enters a KV tile gets a pair
at the end of the list, hung into the merge tree behind the pairs it has. A plan made from scratch lists the pairs in
another order; without a window it merges the same ones in the same order.
"""

import numpy as np

from model_runner_base.attention.loops import FAN_IN
from model_runner_base.attention.plan import AttentionPlan, PlanGeometry
from model_runner_base.host_loops import compiled

NO_ROOM = -1


class SteadyPlan:
    """Views of one group's sections of the packed buffer, and what is needed to add to them. R requests, one tile each.

    Args:
        plan: the plan that was packed into ``views``, uniform decode.
        block_table: [rows, blocks], of the group.
        rows: [R] those of the requests in ``block_table``.
        views: the packed sections by name.
        index: the group's number in those names.
    """

    def __init__(
        self,
        geometry: PlanGeometry,
        plan: AttentionPlan,
        block_table: np.ndarray,
        rows: np.ndarray,
        views: dict[str, np.ndarray],
        index: int,
    ) -> None:
        self.num_pairs = plan.num_pairs
        self._geometry = geometry
        self._plan = plan
        self._block_table = block_table
        self._rows = rows
        self._views = views
        self._index = index

    def begin(self, increments: dict[str, np.ndarray]) -> None:
        """Nothing grows but positions; counts the tree that was packed."""
        index, views = self._index, self._views
        levels = range(self._geometry.num_levels)
        self._pair_sections = views[f"pair_tile.{index}"], views[f"pair_start.{index}"], views[f"pair_blocks.{index}"]
        trees = tuple(views[f"tree.{index}.{level}"] for level in levels)
        self._tree = trees, *count_children(self._plan.pairs_per_tile, len(levels), FAN_IN)
        self._slot_blocks, self._positions = views[f"slot_blocks.{index}"], views["positions"]
        block_size = self._geometry.block_size
        self._steps_to_entry = block_size - int((self._positions[: len(self._rows)] % block_size).max())

    def advance(self) -> bool:
        """Follows the positions, which have been moved on by one token a request.

        Returns False, and leaves the sections in disorder, if they have no room for the pairs that are needed.
        """
        self._steps_to_entry -= 1
        if self._steps_to_entry:
            return True
        geometry = self._geometry
        self.num_pairs, self._steps_to_entry = enter_blocks(
            geometry.block_size,
            geometry.kv_tile,
            geometry.window or 0,
            self.num_pairs,
            self._positions,
            self._rows,
            self._block_table,
            self._slot_blocks,
            self._pair_sections,
            self._tree,
        )
        return self.num_pairs != NO_ROOM


@compiled
def count_children(
    pairs_per_tile: np.ndarray, num_levels: int, fan_in: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each level of the merge tree and request, [levels, R], the number of children and the last of them; and for
    each level, [levels], the number of children in all.
    """
    counts = np.empty((num_levels, len(pairs_per_tile)), np.int64)
    last = np.empty_like(counts)
    totals = np.zeros(num_levels, np.int64)
    for tile in range(len(pairs_per_tile)):
        count = pairs_per_tile[tile]
        for level in range(num_levels):
            totals[level] += count
            counts[level, tile], last[level, tile] = count, totals[level] - 1
            count = (count + fan_in - 1) // fan_in
    return counts, last, totals


@compiled
def enter_blocks(
    block_size: int,
    kv_tile: int,
    window: int,
    num_pairs: int,
    positions: np.ndarray,
    rows: np.ndarray,
    block_table: np.ndarray,
    slot_blocks: np.ndarray,
    pair_sections: tuple[np.ndarray, np.ndarray, np.ndarray],
    tree: tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray],
) -> tuple[int, int]:
    """Sees to the requests that have reached the first position of a block.

    ``window`` is 0 if there is none. ``tree`` holds the levels, and by level and request the number of children and the
    last of them, and by level the number of children in all. Returns the number of pairs, or NO_ROOM, and after how
    many steps the next request enters a block.
    """
    pair_tile, pair_start, pair_blocks = pair_sections
    last_pair = tree[2][0]
    steps = block_size
    for tile in range(len(rows)):
        position = positions[tile]
        block = position // block_size
        offset = position - block * block_size
        steps = min(steps, block_size - offset)
        if offset:
            continue
        block_id = block_table[rows[tile], block]
        slot_blocks[tile] = block_id
        if position % kv_tile == 0:
            pair = fallen_pair(tile, position, window, kv_tile, num_pairs, pair_tile, pair_start)
            if pair < 0:
                pair = num_pairs
                num_pairs += 1
                if num_pairs == len(pair_tile):  # The last pair stays neutral.
                    return NO_ROOM, 0
                pair_tile[pair] = tile
                hang(tree, tile, pair)
            pair_start[pair] = position
            last_pair[tile] = pair
        pair_blocks[last_pair[tile], block % pair_blocks.shape[1]] = block_id
    return num_pairs, steps


@compiled
def fallen_pair(
    tile: int, position: int, window: int, kv_tile: int, num_pairs: int, pair_tile: np.ndarray, pair_start: np.ndarray
) -> int:
    """A pair of the tile's that has fallen out of the window and gives up its place, or -1."""
    if window:
        for pair in range(num_pairs):
            if pair_tile[pair] == tile and position - pair_start[pair] >= window + kv_tile - 1:
                return pair
    return -1


@compiled
def hang(tree: tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray], tile: int, child: int) -> None:
    """Adds a child to a tile's lowest level of the tree, and the nodes above that this takes."""
    levels, counts, last, totals = tree
    fan_in = levels[0].shape[1]
    for level in range(len(levels)):
        place = counts[level, tile] % fan_in
        counts[level, tile] += 1
        last[level, tile] = child
        if level == len(levels) - 1:
            levels[level][tile, place] = child
        else:
            # A full node is followed by a new one, which the next level has to take in.
            node = totals[level + 1] if place == 0 else last[level + 1, tile]
            levels[level][node, place] = child
            if place != 0:
                return
            totals[level + 1] += 1
            child = node
