"""Updates of a packed plan of decode rows while its step is repeated, made where requests enter cache blocks.

Nothing is planned again. If a request enters a block, the block's id is written. If it enters a KV tile, a pair is
added at the end of the list, and linked into the merge tree after the request's other pairs. A plan made from scratch
lists the pairs in another order; it merges the same pairs in the same order as long as none leaves the row's key range.

Example: blocks of 16, KV tiles of 64. A request at position 47 is repeated. At 48 it enters a block: two entries, the
block's id in its last pair and as the row's own. At 64 it enters a KV tile: further entries for a new pair (tile,
start) and for the tree. The steps between these change nothing in the buffer.
"""

from typing import Any

import numpy as np

from model_runner_base.attention.loops import FAN_IN, first_seen
from model_runner_base.attention.plan import PairCount, PairGeometry
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.sizes import StepLimits

PLAN_IS_FULL = -1


class PlanUpdates:
    """Decode plan of one group in the packed buffer, and the state needed to add to it. R requests, one tile each.

    Args:
        names: names of the group's sections: rows' own blocks; pairs' tiles, starts and blocks; the levels of the tree.
        count: the pairs that were packed.
        block_table: the group's block table.
        rows: [R] rows of the requests in ``block_table``.
        limits: say which positions a row may touch around the one that the scheduler says.
    """

    def __init__(
        self,
        geometry: PairGeometry,
        names: tuple[str, str, str, str, list[str]],
        step: PackedStep,
        count: PairCount,
        block_table: BlockTable,
        rows: np.ndarray,
        limits: StepLimits,
    ) -> None:
        own_blocks, pair_tile, pair_start, pair_blocks, levels = names
        self.num_pairs = count.num_pairs
        self._geometry = geometry
        self._step = step
        self._count = count
        self._block_table = block_table
        self._rows = rows
        self._limits = limits
        self._reached: np.ndarray
        """[R] last block of each request that is in the plan."""
        self._last_pair: np.ndarray
        """[R] pair of each request's last KV tile in the plan."""
        self._ring = step.views[own_blocks].shape[1]
        self._pairs = step.views[pair_tile], step.views[pair_start]
        self._places = np.array(
            [step.offsets[name] for name in (own_blocks, pair_tile, pair_start, pair_blocks, *levels)], np.int64
        )
        """Indices in the buffer at which the sections begin."""
        self._num_levels = len(levels)
        self._steps_to_entry = 0
        self._tree: Any = None

    def begin(self, positions: np.ndarray) -> None:
        """Counts the nodes of the tree; ``positions`` [R] int64 are those of the step that was packed."""
        self._tree = count_children(self._count.per_tile, self._num_levels, FAN_IN)
        self._last_pair = self._count.per_tile.cumsum() - 1
        stops = np.minimum(positions + self._limits.decode.query + self._limits.ahead, self._limits.max_model_len)
        self._reached = (stops - 1) // self._geometry.block_size
        self._steps_to_entry = 1

    def follow(self, positions: np.ndarray) -> bool:
        """Updates the plan for ``positions``, which have moved on by one token, or by as many as drafts may have been
        right.

        Returns False if the sections have no space for the pairs that are needed; they are inconsistent then.
        """
        self._steps_to_entry -= 1
        if self._steps_to_entry:
            return True
        geometry, limits, entries = self._geometry, self._limits, self._step.entries
        self.num_pairs, self._steps_to_entry = enter_blocks(
            geometry.block_size,
            geometry.kv_tile,
            geometry.key_range.window,
            geometry.key_range.chunk,
            FAN_IN,
            limits.unread,
            limits.decode.query,
            limits.ahead,
            limits.max_model_len,
            self.num_pairs,
            positions,
            self._reached,
            self._rows,
            self._block_table.table,
            self._block_table.num_blocks,
            self._ring,
            self._last_pair,
            self._pairs,
            self._places,
            self._tree,
            self._step.buffer,
            entries.array,
            entries.count,
        )
        return self.num_pairs != PLAN_IS_FULL


@compiled
def count_children(
    pairs_per_tile: np.ndarray, num_levels: int, fan_in: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts children in the merge tree: number and last of them by level and request [levels, R], number by level
    [levels].
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
def write(buffer: np.ndarray, entries: np.ndarray, num_entries: np.ndarray, place: int, value: int) -> None:
    """Writes one number of the packed buffer, and records it as an entry if there is space for one."""
    buffer[place] = value
    if num_entries[0] < entries.shape[1]:
        entries[0, num_entries[0]] = place
        entries[1, num_entries[0]] = value
    num_entries[0] += 1


@compiled
def enter_blocks(
    block_size: int,
    kv_tile: int,
    window: int,
    chunk: int,
    fan_in: int,
    unread: int,
    query: int,
    ahead: int,
    max_model_len: int,
    num_pairs: int,
    positions: np.ndarray,
    reached: np.ndarray,
    rows: np.ndarray,
    block_table: np.ndarray,
    num_blocks: np.ndarray,
    ring: int,
    last_pair: np.ndarray,
    pairs: tuple[np.ndarray, np.ndarray],
    places: np.ndarray,
    tree: tuple[np.ndarray, np.ndarray, np.ndarray],
    buffer: np.ndarray,
    entries: np.ndarray,
    num_entries: np.ndarray,
) -> tuple[int, int]:
    """Adds the blocks that requests may touch after those that they have ``reached`` [R], and updates ``reached``.

    A request is at its position in ``positions`` [R], or up to ``unread`` before it. It touches ``query + ahead``
    positions from there, as far as they are before ``max_model_len``.

    ``ring`` is the number of own blocks of a row. ``last_pair`` [R] is the pair that each request was in. ``pairs`` are
    the sections of pairs' tiles and starts. ``places`` are the indices in ``buffer`` at which the sections begin: rows'
    own blocks, these two, pairs' blocks, and the levels of the tree. ``tree`` is what ``count_children`` returns.

    Returns the number of pairs, or PLAN_IS_FULL; and the number of steps after which a request may touch a further
    block, if each step moves it on by ``query`` tokens.
    """
    pair_tile, pair_start = pairs
    blocks_per_tile = kv_tile // block_size
    left = block_size
    for tile in range(len(rows)):
        row, end = rows[tile], min(positions[tile] + query + ahead, max_model_len) - 1
        last = end // block_size
        left = min(left, block_size - end % block_size)
        for block in range(reached[tile] + 1, last + 1):
            if block % blocks_per_tile == 0:
                pair = fallen_pair(
                    tile, first_seen(positions[tile] - unread, window, chunk), kv_tile, num_pairs, pair_tile, pair_start
                )
                if pair < 0:
                    pair = num_pairs
                    num_pairs += 1
                    if num_pairs == len(pair_tile):  # The last pair stays neutral.
                        return PLAN_IS_FULL, 0
                    write(buffer, entries, num_entries, places[1] + pair, tile)
                    hang(tree, tile, pair, fan_in, places, buffer, entries, num_entries)
                write(buffer, entries, num_entries, places[2] + pair, block * block_size)
                last_pair[tile] = pair
            block_id = block_table[row, block] if block < num_blocks[row] else 0
            place = places[3] + last_pair[tile] * blocks_per_tile + block % blocks_per_tile
            write(buffer, entries, num_entries, place, block_id)
            write(buffer, entries, num_entries, places[0] + tile * ring + block % ring, block_id)
        reached[tile] = max(reached[tile], last)
    return num_pairs, (left + query - 1) // query


@compiled
def fallen_pair(
    tile: int, first: int, kv_tile: int, num_pairs: int, pair_tile: np.ndarray, pair_start: np.ndarray
) -> int:
    """Returns a pair of the tile whose keys all lie before ``first``, its first seen position, to be reused; or -1."""
    if first:
        for pair in range(num_pairs):
            if pair_tile[pair] == tile and pair_start[pair] + kv_tile <= first:
                return pair
    return -1


@compiled
def hang(
    tree: tuple[np.ndarray, np.ndarray, np.ndarray],
    tile: int,
    child: int,
    fan_in: int,
    places: np.ndarray,
    buffer: np.ndarray,
    entries: np.ndarray,
    num_entries: np.ndarray,
) -> None:
    """Adds a child to a tile's lowest level of the tree, and to the levels above the nodes that this needs."""
    counts, last, totals = tree
    for level in range(len(totals)):
        place = counts[level, tile] % fan_in
        counts[level, tile] += 1
        last[level, tile] = child
        # The highest level has one node for each tile, in the tiles' order.
        if level == len(totals) - 1:
            write(buffer, entries, num_entries, places[4 + level] + tile * fan_in + place, child)
        else:
            # After a full node comes a new one, which becomes a child on the next level.
            node = totals[level + 1] if place == 0 else last[level + 1, tile]
            write(buffer, entries, num_entries, places[4 + level] + node * fan_in + place, child)
            if place != 0:
                return
            totals[level + 1] += 1
            child = node
