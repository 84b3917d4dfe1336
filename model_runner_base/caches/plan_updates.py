"""Cache blocks that a step's own tokens are written to, and updates of a packed plan while its step is repeated.

Nothing is planned again where a request of a repeated step enters a cache block. The block's id is written, in the plan
and as one of the row's own blocks. If the request enters a KV tile, a pair is added at the end of the list, and linked
into the merge tree after the request's other pairs. A plan made from scratch lists the pairs in another order; it
merges the same pairs in the same order as long as none leaves the row's key range.

Example: blocks of 16, KV tiles of 64. A request at position 47 is repeated. At 48 it enters a block: two entries, the
block's id in its last pair and as the row's own. At 64 it enters a KV tile: further entries for a new pair (tile,
start) and for the tree. The steps between these change nothing in the buffer.
"""

from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import FAN_IN, PairCount, PairGeometry, first_seen
from model_runner_base.step.call import ChunkTiles, DecodeRows
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepLimits

PLAN_IS_FULL = -1


class Reach(NamedTuple):
    """Numbers of a group that are the same in each step: how its positions are cut, and which ones a step touches.

    A request is at the position that the scheduler says, or up to ``unread`` before it. It touches ``query + ahead``
    positions from there, as far as they are before ``max_model_len``.
    """

    block_size: int
    kv_tile: int
    window: int
    chunk: int
    fan_in: int
    """Number of children of a node of the merge tree."""
    ring: int
    """Number of own blocks of a row."""
    unread: int
    query: int
    ahead: int
    max_model_len: int


class Reached(NamedTuple):
    """Requests of a plan, R of them, and how far the plan goes for each."""

    rows: np.ndarray
    """[R] rows in the block table."""
    block_table: np.ndarray
    num_blocks: np.ndarray
    last_block: np.ndarray
    """[R] last block of each request that is in the plan."""
    last_pair: np.ndarray
    """[R] pair of each request's last KV tile in the plan."""


class MergeTree(NamedTuple):
    """Children in the merge tree, by level and request [levels, R]."""

    counts: np.ndarray
    """[levels, R] number of a request's children on each level."""
    last: np.ndarray
    """[levels, R] the last one of them."""
    totals: np.ndarray
    """[levels] number of all requests' children."""


class Changes(NamedTuple):
    """Packed buffer of a step, and what changes in it."""

    buffer: np.ndarray
    entries: np.ndarray
    """[2, E] places and numbers (``Entries.array``)."""
    num_changes: np.ndarray
    """[1], as ``Entries.count``."""

    @classmethod
    def of(cls, step: PackedStep) -> "Changes":
        return cls(step.buffer, step.entries.array, step.entries.count)


class Sections(NamedTuple):
    """Sections of a plan in the packed buffer."""

    pair_tile: np.ndarray
    pair_start: np.ndarray
    begins: np.ndarray
    """Places at which they begin: rows' own blocks; pairs' tiles, starts and blocks; the levels of the tree."""


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
        *before, levels = names
        self.num_pairs = count.num_pairs
        self._count = count
        self._num_levels = len(levels)
        self._reach = Reach(
            geometry.block_size,
            geometry.kv_tile,
            geometry.key_range.window,
            geometry.key_range.chunk,
            FAN_IN,
            ring=step.views[names[0]].shape[1],
            unread=limits.unread,
            query=limits.decode.query,
            ahead=limits.ahead,
            max_model_len=limits.max_model_len,
        )
        unset = np.empty(len(rows), np.int64)
        self._reached = Reached(rows, block_table.table, block_table.num_blocks, unset, unset.copy())
        begins = np.array([step.offsets[name] for name in (*before, *levels)], np.int64)
        self._sections = Sections(step.views[names[1]], step.views[names[2]], begins)
        self._changes = Changes.of(step)
        self._steps_to_entry = 0
        self._tree: MergeTree

    def begin(self, positions: np.ndarray) -> None:
        """Counts the nodes of the tree; ``positions`` [R] int64 are those of the step that was packed."""
        per_tile, reach, reached = self._count.per_tile, self._reach, self._reached
        self._tree = count_children(per_tile, self._num_levels, reach.fan_in)
        reached.last_pair[:] = per_tile.cumsum() - 1
        stops = np.minimum(positions + reach.query + reach.ahead, reach.max_model_len)
        reached.last_block[:] = (stops - 1) // reach.block_size
        self._steps_to_entry = 1

    def advance(self, positions: np.ndarray) -> bool:
        """Updates the plan for ``positions``, which have moved on by one token, or by as many as drafts may have been
        right.

        Returns False if the sections have no space for the pairs that are needed; they are inconsistent then.
        """
        self._steps_to_entry -= 1
        if self._steps_to_entry:
            return True
        self.num_pairs, self._steps_to_entry = enter_blocks(
            self._reach, self._reached, self._tree, self._sections, self._changes, positions, self.num_pairs
        )
        return self.num_pairs != PLAN_IS_FULL


@compiled
def count_children(pairs_per_tile: np.ndarray, num_levels: int, fan_in: int) -> MergeTree:
    """Counts the children in the merge tree of requests that have so many pairs each."""
    counts = np.empty((num_levels, len(pairs_per_tile)), np.int64)
    last = np.empty_like(counts)
    totals = np.zeros(num_levels, np.int64)
    for tile in range(len(pairs_per_tile)):
        count = pairs_per_tile[tile]
        for level in range(num_levels):
            totals[level] += count
            counts[level, tile], last[level, tile] = count, totals[level] - 1
            count = (count + fan_in - 1) // fan_in
    return MergeTree(counts, last, totals)


@compiled
def write(changes: Changes, place: int, value: int) -> None:
    """Writes one number of the packed buffer, and records it as an entry if there is space for one."""
    changes.buffer[place] = value
    count = changes.num_changes[0]
    if count < changes.entries.shape[1]:
        changes.entries[0, count] = place
        changes.entries[1, count] = value
    changes.num_changes[0] += 1


@compiled
def enter_blocks(
    reach: Reach,
    reached: Reached,
    tree: MergeTree,
    sections: Sections,
    changes: Changes,
    positions: np.ndarray,
    num_pairs: int,
) -> tuple[int, int]:
    """Adds the blocks that requests at ``positions`` [R] may touch after those that the plan has, and updates
    ``reached``.

    Returns the number of pairs, or PLAN_IS_FULL; and the number of steps after which a request may touch a further
    block, if each step moves it on by ``query`` tokens.
    """
    size, kv_tile, begins = reach.block_size, reach.kv_tile, sections.begins
    blocks_per_tile = kv_tile // size
    left = size
    for tile in range(len(reached.rows)):
        row, end = reached.rows[tile], min(positions[tile] + reach.query + reach.ahead, reach.max_model_len) - 1
        last = end // size
        left = min(left, size - end % size)
        for block in range(reached.last_block[tile] + 1, last + 1):
            if block % blocks_per_tile == 0:
                first = first_seen(positions[tile] - reach.unread, reach.window, reach.chunk)
                pair = unseen_pair(tile, first, kv_tile, num_pairs, sections)
                if pair < 0:
                    pair = num_pairs
                    num_pairs += 1
                    if num_pairs == len(sections.pair_tile):  # The last pair stays neutral.
                        return PLAN_IS_FULL, 0
                    write(changes, begins[1] + pair, tile)
                    add_child(tree, tile, pair, reach.fan_in, begins, changes)
                write(changes, begins[2] + pair, block * size)
                reached.last_pair[tile] = pair
            block_id = reached.block_table[row, block] if block < reached.num_blocks[row] else 0
            place = begins[3] + reached.last_pair[tile] * blocks_per_tile + block % blocks_per_tile
            write(changes, place, block_id)
            write(changes, begins[0] + tile * reach.ring + block % reach.ring, block_id)
        reached.last_block[tile] = max(reached.last_block[tile], last)
    return num_pairs, (left + reach.query - 1) // reach.query


@compiled
def unseen_pair(tile: int, first: int, kv_tile: int, num_pairs: int, sections: Sections) -> int:
    """Returns a pair of the tile whose keys all lie before ``first``, its first seen position, to be reused; or -1."""
    if first:
        for pair in range(num_pairs):
            if sections.pair_tile[pair] == tile and sections.pair_start[pair] + kv_tile <= first:
                return pair
    return -1


@compiled
def add_child(tree: MergeTree, tile: int, child: int, fan_in: int, begins: np.ndarray, changes: Changes) -> None:
    """Adds a child to a tile's lowest level of the tree, and to the levels above the nodes that this needs."""
    counts, last, totals = tree
    for level in range(len(totals)):
        place = counts[level, tile] % fan_in
        counts[level, tile] += 1
        last[level, tile] = child
        # The highest level has one node for each tile, in the tiles' order.
        if level == len(totals) - 1:
            write(changes, begins[4 + level] + tile * fan_in + place, child)
        else:
            # After a full node comes a new one, which becomes a child on the next level.
            node = totals[level + 1] if place == 0 else last[level + 1, tile]
            write(changes, begins[4 + level] + node * fan_in + place, child)
            if place != 0:
                return
            totals[level + 1] += 1
            child = node


def blocks_of_rows(rows: DecodeRows, ring: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R * Q] int32 block of each place of decode rows, the null block where there is no token.

    ``ring`` [R, N] is as ``fill_ring`` writes it.
    """
    if ring.shape[1] == 1:
        blocks = ring.expand_as(rows.positions)
    else:
        blocks = ring.gather(1, (rows.positions // block_size % ring.shape[1]).long())
    if rows.is_token is not None:
        blocks = torch.where(rows.is_token, blocks, 0)
    return blocks.reshape(-1)


def blocks_of_chunks(
    tiles: ChunkTiles, last_pair: torch.Tensor, plan: PairPlan, geometry: PairGeometry
) -> torch.Tensor:
    """[C] int32 block of each token of chunks, the null block for padding; ``last_pair`` [NT] is each tile's last pair.

    A tile's pairs follow each other in the order of their keys.
    """
    tile = tiles.slots // tiles.query
    assert plan.pair_start is not None and plan.pair_blocks is not None
    last_kv_tile = plan.pair_start[last_pair] // geometry.kv_tile
    pair = last_pair[tile] - (last_kv_tile[tile] - tiles.positions // geometry.kv_tile)
    block = plan.pair_blocks[pair.clamp(min=0), tiles.positions % geometry.kv_tile // geometry.block_size]
    return torch.where(tiles.is_real, block, 0)


def ring_size(reach: int, block_size: int) -> int:
    """Largest number of blocks that ``reach`` consecutive positions can touch."""
    return 1 + -(-(reach - 1) // block_size)


@compiled
def fill_ring(
    block_size: int,
    first: np.ndarray,
    stop: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    num_blocks: np.ndarray,
    ring: np.ndarray,
) -> None:
    """Writes the blocks of positions from ``first`` [R] to before ``stop`` [R] to a ring for each row, [R, N], padded.

    Block b of a row is at place b % N of its ring; places without a block hold the null block.

    Example, with blocks of 16 and N = 2: positions 28 to 34 are in blocks 1 and 2 of a row that has [7, 9, 4]; its ring
    is [4, 9].
    """
    size = ring.shape[1]
    for index in range(len(rows)):
        row = rows[index]
        for place in range(size):
            ring[index, place] = 0
        for block in range(first[index] // block_size, (stop[index] - 1) // block_size + 1):
            if block < num_blocks[row]:
                ring[index, block % size] = table[row, block]
    ring[len(rows) :] = 0
