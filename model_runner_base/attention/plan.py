"""Block-sparse attention plan: which query tile meets which KV tile.

Attention is computed over (query tile, KV tile) pairs. A query tile is up to ``tiling.query`` consecutive tokens of one
request, a KV tile ``tiling.keys`` consecutive cache positions of the same request. Only pairs that hold a key that a
token of the query tile sees are listed. So the work is proportional to the tokens that exist, and not to the number of
rows times the longest context. First the pairs are counted, which gives the size that the step needs. Then they are
listed in the packed buffer of the size that the step runs at. Padding pairs are masked.

Example: KV tiles of 64 positions, a request in decode at position 130. Its query tile is one token; its pairs are KV
tiles 0, 1 and 2, of which the last holds three keys that the token sees.

The keys that a token sees are one interval ``[first, last]`` of positions (``KeyRange``):

- Causal attention: ``[0, position]``.
- A sliding window of w: ``[position - w + 1, position]``.
- Chunks of c, as in Llama 4's local layers: ``[position // c * c, position]``.
- Encoder-only layers, whose requests are whole in one step: ``[0, length - 1]``. With a window of w to both sides:
  ``[position - w + 1, position + w - 1]``.

The graph computes both ends from positions and lengths, so neither is sent.

Example: with a window of 4 the token at position 6 sees keys 3 to 6; with chunks of 4 it sees keys 4 to 6. Of a whole
request of 8 tokens it sees keys 0 to 7, with a window of 4 keys 3 to 7.

A pair yields an unnormalised partial result with its running maximum and sum (the online-softmax state of
FlashAttention, arXiv:2205.14135). In plain torch each result is added to that of the pair's query tile
(attention/pieces.py). A plan also has a merge tree, which leads from a query tile's pairs to the tile: level by level,
a node has up to ``FAN_IN`` children of the level below. Chunks take their maxima by it, and kernels may merge results
by it, without a scatter or a sort.

The decode plan of a step that is repeated (step/repeat.py) grows in the packed buffer (``PlanUpdates``). Where a
request enters a cache block, the block's id is written. If the request enters a KV tile, a pair is added at the end of
the list, and linked into the merge tree after the request's other pairs. A plan made from scratch lists the pairs in
another order; it merges the same pairs in the same order as long as none leaves the row's key range.

Example: blocks of 16, KV tiles of 64. A request at position 47 is repeated. At 48 it enters a block: two entries, the
block's id in its last pair and as the row's own. At 64 it enters a KV tile: further entries for a new pair (tile,
start) and for the tree. The steps between these change nothing in the buffer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import Changes, PackedStep, write_entry
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepLimits

FAN_IN = 8
FAR = 1 << 29
"""Start of a padding pair: a position after all that any token sees."""
PLAN_IS_FULL = -1


class KeyRange(NamedTuple):
    """Rule for the keys that the tokens of a layer see."""

    window: int = 0
    """Size of the window: a token sees itself and ``window - 1`` tokens before it; 0: no window."""
    chunk: int = 0
    """Number of positions in a chunk: a token sees no key of an earlier chunk; 0: no chunks."""
    is_whole: bool = False
    """Whether a token also sees keys after it: all of its request, or ``window - 1`` of them."""

    def first(self, positions: torch.Tensor) -> torch.Tensor | None:
        """First position that tokens at ``positions`` see, of the same shape; None if it is 0 for all."""
        if self.window:
            return (positions - (self.window - 1)).clamp(min=0)
        if self.chunk:
            # A remainder is exact, while a compiler may divide integers as floats.
            return positions - positions % self.chunk
        return None

    def last_of_whole(self, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last position that tokens at ``positions`` see of whole requests; ``lengths`` broadcast to ``positions``."""
        last = lengths - 1
        return torch.minimum(last, positions + (self.window - 1)) if self.window else last.expand_as(positions)


CAUSAL = KeyRange()
"""Rule by which a token sees itself and everything before it."""


@dataclass(frozen=True)
class PairGeometry:
    """Fixed sizes of the pairs of one KV-cache group with one key range: of its decode rows, or of its chunks."""

    block_size: int
    query_tile: int
    kv_tile: int
    """Number of cache positions in a KV tile, a multiple of ``block_size``."""
    max_kv_tiles: int
    key_range: KeyRange = CAUSAL

    @property
    def blocks_per_tile(self) -> int:
        return self.kv_tile // self.block_size

    @property
    def num_levels(self) -> int:
        """Number of levels of the merge tree that the longest request needs."""
        levels, num_merged = 1, FAN_IN
        while num_merged < self.max_kv_tiles:
            levels, num_merged = levels + 1, num_merged * FAN_IN
        return levels

    def level_sizes(self, num_tiles: int, num_pairs: int) -> list[int]:
        """Number of nodes on each level of the merge tree, from the one above the pairs to the one that holds the
        tiles.

        Each query tile may have one partly filled node on an inner level. The last node of a level is neutral: it adds
        nothing, and padding points to it.
        """
        sizes = []
        below = num_pairs
        for _ in range(self.num_levels - 1):
            below = below // FAN_IN + num_tiles + 1
            sizes.append(below)
        return [*sizes, num_tiles]

    def count(
        self,
        query_len: np.ndarray,
        num_computed: np.ndarray,
        num_tokens: int,
        spans: tuple[np.ndarray, np.ndarray],
    ) -> "PairCount":
        """Counts the pairs of requests that have ``query_len`` [R] int64 new tokens, after ``num_computed`` [R] int64
        tokens in the cache.

        ``num_tokens`` is the sum of ``query_len``. ``spans`` are the first and last position of each token's span,
        int32, or empty.
        """
        per_tile = np.empty(num_tokens // self.query_tile + len(query_len), np.int64)  # A last tile may be ragged.
        tile, key_range = self.query_tile, self.key_range
        num_tiles, num_pairs = count_pairs(tile, self.kv_tile, *key_range, query_len, num_computed, *spans, per_tile)
        return PairCount(per_tile[:num_tiles], num_pairs)


class PairCount(NamedTuple):
    """Number of pairs of a step's NT query tiles, before padding."""

    per_tile: np.ndarray
    """[NT] number of pairs of each query tile."""
    num_pairs: int

    @property
    def num_tiles(self) -> int:
        return len(self.per_tile)


def kv_tile_for(block_size: int, target: int = 64, least: int = 1) -> int:
    """Size of a KV tile near ``target`` and no less than ``least``: some blocks, or an integer fraction of a block.

    A request pays for whole tiles, so small tiles suit short contexts. Long contexts cost the same with tiles of 64 and
    256. Raises ValueError for a large block that has no such fraction.
    """
    if block_size <= target:
        return max(target // block_size, -(-least // block_size)) * block_size
    # A kernel whose tiles are multiples of 128 multiplies 128 positions at a time.
    granule = 128 if target % 128 == 0 and block_size % 128 == 0 else 1
    tiles = [size for size in range(granule, block_size + 1, granule) if block_size % size == 0 and size >= least]
    tile = min(tiles, key=lambda size: max(size / target, target / size))
    if not target // 4 <= tile <= 4 * target:
        suitable = -(-block_size // target) * target
        raise ValueError(
            f"block_size={block_size} cannot be read in parts of {target // 4} to {4 * target} tokens: "
            f"use a multiple of {target}, such as {suitable}"
        )
    return tile


def stored_block_size(block_size: int, target: int, least: int = 1) -> int:
    """Number of tokens in a block of the cache tensors.

    If a block of the scheduler is larger than a KV tile, it is stored as consecutive blocks of one tile each.
    """
    return min(block_size, kv_tile_for(block_size, target, least))


@compiled
def first_seen(position: int, window: int, chunk: int) -> int:
    """First position that a token sees (see ``KeyRange``)."""
    if window:
        return max(0, position - window + 1)
    if chunk:
        return position // chunk * chunk
    return 0


@compiled
def last_seen(position: int, request_end: int, window: int, is_whole: bool) -> int:
    """Last position that a token sees of a request whose tokens end before ``request_end`` (see ``KeyRange``)."""
    if not is_whole:
        return position
    if window:
        return min(position + window, request_end) - 1
    return request_end - 1


@compiled
def kv_tiles_of(
    position: int,
    end: int,
    request_end: int,
    kv_tile: int,
    window: int,
    chunk: int,
    is_whole: bool,
    span_first: np.ndarray,
    span_last: np.ndarray,
) -> tuple[int, int]:
    """First KV tile that a query tile from ``position`` to before ``end`` sees, and the one after its last.

    ``span_first`` and ``span_last`` are the ends of its tokens' spans, which they see too; they may be empty.
    """
    first, last = first_seen(position, window, chunk), last_seen(end - 1, request_end, window, is_whole)
    for index in range(len(span_first)):
        first, last = min(first, span_first[index]), max(last, span_last[index])
    return first // kv_tile, last // kv_tile + 1


@compiled
def count_pairs(
    query_tile: int,
    kv_tile: int,
    window: int,
    chunk: int,
    is_whole: bool,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    span_first: np.ndarray,
    span_last: np.ndarray,
    pairs_per_tile: np.ndarray,
) -> tuple[int, int]:
    """Writes the number of pairs of each query tile; returns the number of tiles and the number of pairs.

    ``span_first`` and ``span_last`` are the ends of all tokens' spans, or empty.
    """
    tile = num_pairs = token = 0
    for request in range(len(query_len)):
        first, request_end = num_computed[request], num_computed[request] + query_len[request]
        while first < request_end:
            end = min(first + query_tile, request_end)
            next_token = token + end - first
            spans = span_first[token:next_token], span_last[token:next_token]
            start, stop = kv_tiles_of(first, end, request_end, kv_tile, window, chunk, is_whole, *spans)
            pairs_per_tile[tile] = stop - start
            num_pairs += stop - start
            tile += 1
            first, token = end, next_token
    return tile, num_pairs


@compiled
def fill_pairs(
    query_tile: int,
    kv_tile: int,
    window: int,
    chunk: int,
    is_whole: bool,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    span_first: np.ndarray,
    span_last: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    pair_tile: np.ndarray,
    pair_start: np.ndarray,
    pair_blocks: np.ndarray,
) -> None:
    """Writes each pair's query tile [NP], the first position of its KV tile [NP], and that tile's blocks [NP, B].

    No token sees a padding pair, so padding pairs keep the tiles and blocks of an earlier step. The last pair is always
    padding, and its blocks are the null block; padding tiles name it as their pair.
    """
    width = pair_blocks.shape[1]
    all_blocks = pair_blocks.reshape(-1)
    tile = pair = token = 0
    for request in range(len(query_len)):
        row_blocks = table[rows[request]]
        first, request_end = num_computed[request], num_computed[request] + query_len[request]
        while first < request_end:
            end = min(first + query_tile, request_end)
            next_token = token + end - first
            spans = span_first[token:next_token], span_last[token:next_token]
            start, stop = kv_tiles_of(first, end, request_end, kv_tile, window, chunk, is_whole, *spans)
            next_pair = pair + stop - start
            # Slices, so that the compiler can fill several places at a time.
            tiles, starts = pair_tile[pair:next_pair], pair_start[pair:next_pair]
            for index in range(stop - start):
                tiles[index] = tile
                starts[index] = (start + index) * kv_tile
            blocks, seen = all_blocks[pair * width : next_pair * width], row_blocks[start * width : stop * width]
            for index in range(len(blocks)):
                blocks[index] = seen[index]
            pair = next_pair
            tile += 1
            first, token = end, next_token
    # After the first padding pair all are padding: no step of this size reached so far, and the first one padded the
    # buffer of zeros to its end. For this to hold, code that adds pairs must leave no padding between them.
    while pair < len(pair_start) and pair_start[pair] != FAR:
        pair_start[pair] = FAR
        pair += 1


@compiled
def fill_merge_tree(trees: tuple[np.ndarray, ...], pairs_per_tile: np.ndarray, num_pairs: int) -> None:
    """Fills the merge tree of a step of pure decode: each level [nodes, FAN_IN] has node indices of the level below.

    The last node of every level is neutral, and all padding points to it.

    Args:
        trees: levels, padded to ``PairGeometry.level_sizes``.
        num_pairs: padded number of pairs.
    """
    counts = pairs_per_tile
    neutral = num_pairs - 1
    for tree in trees:
        counts = fill_level(tree, counts, neutral)
        neutral = len(tree) - 1


@compiled
def fill_level(tree: np.ndarray, counts: np.ndarray, neutral: int) -> np.ndarray:
    """Fills one level of the merge tree, [nodes, FAN_IN], and returns the number of each tile's nodes on it.

    ``counts`` [NT] are the numbers of each tile's nodes on the level below, where they follow each other. Unused places
    point to ``neutral``.
    """
    num_nodes = np.empty_like(counts)
    node = child = 0
    for tile in range(len(counts)):
        before = node
        last = child + counts[tile]
        while True:
            for lane in range(FAN_IN):
                tree[node, lane] = child + lane if child + lane < last else neutral
            child += FAN_IN
            node += 1
            if child >= last:
                break
        child = last
        num_nodes[tile] = node - before
    while node < len(tree) and tree[node, 0] != neutral:  # As in ``fill_pairs``.
        tree[node] = neutral
        node += 1
    return num_nodes


@compiled
def fill_node_starts(trees: tuple[np.ndarray, ...], pairs_per_tile: np.ndarray) -> None:
    """Fills the merge tree of a mixed step, to which nothing is ever added: each level [nodes + 1] has the first child
    of each node.

    A node's children end where the next node's begin; padding has none.
    """
    counts = pairs_per_tile
    for starts in trees:
        num_nodes = np.empty_like(counts)
        node = child = 0
        for tile in range(len(counts)):
            num_nodes[tile] = (counts[tile] + FAN_IN - 1) // FAN_IN
            for index in range(num_nodes[tile]):
                starts[node] = child + index * FAN_IN
                node += 1
            child += counts[tile]
        starts[node:] = child
        counts = num_nodes


# ---- A plan that grows while its step is repeated ----


class Reach(NamedTuple):
    """Numbers of a group that are the same in each step: how its positions are cut, and which ones a step touches.

    A request is at the position that the scheduler says, or up to ``unread`` before it. It touches ``query + ahead``
    positions from there, as far as they are before ``max_model_len``.
    """

    block_size: int
    kv_tile: int
    window: int
    chunk: int
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


class Children(NamedTuple):
    """Children in the merge tree, by level and request [levels, R]."""

    counts: np.ndarray
    """[levels, R] number of a request's children on each level."""
    last: np.ndarray
    """[levels, R] the last one of them."""
    totals: np.ndarray
    """[levels] number of all requests' children."""


class PlanSections(NamedTuple):
    """PlanSections of a plan in the packed buffer."""

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
            ring=step.views[names[0]].shape[1],
            unread=limits.unread,
            query=limits.decode.query,
            ahead=limits.ahead,
            max_model_len=limits.max_model_len,
        )
        unset = np.empty(len(rows), np.int64)
        self._reached = Reached(rows, block_table.table, block_table.num_blocks, unset, unset.copy())
        begins = np.array([step.offsets[name] for name in (*before, *levels)], np.int64)
        self._sections = PlanSections(step.views[names[1]], step.views[names[2]], begins)
        self._changes = Changes.of(step)
        self._steps_to_entry = 0
        self._children: Children

    def begin(self, positions: np.ndarray) -> None:
        """Counts the nodes of the tree; ``positions`` [R] int64 are those of the step that was packed."""
        per_tile, reach, reached = self._count.per_tile, self._reach, self._reached
        self._children = count_children(per_tile, self._num_levels)
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
            self._reach, self._reached, self._children, self._sections, self._changes, positions, self.num_pairs
        )
        return self.num_pairs != PLAN_IS_FULL


@compiled
def count_children(pairs_per_tile: np.ndarray, num_levels: int) -> Children:
    """Counts the children in the merge tree of requests that have so many pairs each."""
    counts = np.empty((num_levels, len(pairs_per_tile)), np.int64)
    last = np.empty_like(counts)
    totals = np.zeros(num_levels, np.int64)
    for tile in range(len(pairs_per_tile)):
        count = pairs_per_tile[tile]
        for level in range(num_levels):
            totals[level] += count
            counts[level, tile], last[level, tile] = count, totals[level] - 1
            count = (count + FAN_IN - 1) // FAN_IN
    return Children(counts, last, totals)


@compiled
def enter_blocks(
    reach: Reach,
    reached: Reached,
    children: Children,
    sections: PlanSections,
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
                    write_entry(changes, begins[1] + pair, tile)
                    add_child(children, tile, pair, begins, changes)
                write_entry(changes, begins[2] + pair, block * size)
                reached.last_pair[tile] = pair
            block_id = reached.block_table[row, block] if block < reached.num_blocks[row] else 0
            place = begins[3] + reached.last_pair[tile] * blocks_per_tile + block % blocks_per_tile
            write_entry(changes, place, block_id)
            write_entry(changes, begins[0] + tile * reach.ring + block % reach.ring, block_id)
        reached.last_block[tile] = max(reached.last_block[tile], last)
    return num_pairs, (left + reach.query - 1) // reach.query


@compiled
def unseen_pair(tile: int, first: int, kv_tile: int, num_pairs: int, sections: PlanSections) -> int:
    """Returns a pair of the tile whose keys all lie before ``first``, its first seen position, to be reused; or -1."""
    if first:
        for pair in range(num_pairs):
            if sections.pair_tile[pair] == tile and sections.pair_start[pair] + kv_tile <= first:
                return pair
    return -1


@compiled
def add_child(children: Children, tile: int, child: int, begins: np.ndarray, changes: Changes) -> None:
    """Adds a child to a tile's lowest level of the tree, and to the levels above the nodes that this needs."""
    counts, last, totals = children
    for level in range(len(totals)):
        place = counts[level, tile] % FAN_IN
        counts[level, tile] += 1
        last[level, tile] = child
        # The highest level has one node for each tile, in the tiles' order.
        if level == len(totals) - 1:
            write_entry(changes, begins[4 + level] + tile * FAN_IN + place, child)
        else:
            # After a full node comes a new one, which becomes a child on the next level.
            node = totals[level + 1] if place == 0 else last[level + 1, tile]
            write_entry(changes, begins[4 + level] + node * FAN_IN + place, child)
            if place != 0:
                return
            totals[level + 1] += 1
            child = node
