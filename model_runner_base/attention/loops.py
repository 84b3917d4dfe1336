"""The loops of the attention plan: over query tiles, pairs, tokens and nodes of the merge tree."""

import numpy as np

from model_runner_base.host_loops import compiled

FAN_IN = 8
FAR = 1 << 30
"""Start of a pair whose positions lie behind the causal mask of every token."""


@compiled
def count_pairs(
    query_tile: int, kv_tile: int, window: int, query_len: np.ndarray, num_computed: np.ndarray
) -> tuple[np.ndarray, int]:
    """The pairs of each query tile [NT], and of all; ``window`` is 0 if there is none."""
    num_tiles = 0
    for length in query_len:
        num_tiles += (length + query_tile - 1) // query_tile
    pairs_per_tile = np.empty(num_tiles, np.int64)
    tile = num_pairs = 0
    for request in range(len(query_len)):
        for first in range(0, query_len[request], query_tile):
            length = min(query_tile, query_len[request] - first)
            start, stop = kv_tiles_of(num_computed[request] + first, length, kv_tile, window)
            pairs_per_tile[tile] = stop - start
            num_pairs += stop - start
            tile += 1
    return pairs_per_tile, num_pairs


@compiled
def kv_tiles_of(position: int, length: int, kv_tile: int, window: int) -> tuple[int, int]:
    """The first KV tile that a query tile sees, and the one behind its last."""
    start = max(0, position - window + 1) // kv_tile if window else 0
    return start, (position + length - 1) // kv_tile + 1


@compiled
def fill_group(
    block_size: int,
    query_tile: int,
    kv_tile: int,
    window: int,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    slot_blocks: np.ndarray,
    pair_tile: np.ndarray,
    pair_start: np.ndarray,
    pair_blocks: np.ndarray,
) -> None:
    """A group's sections of the packed buffer but the merge tree, in one call: see the loops below."""
    fill_slots(block_size, query_len, num_computed, rows, table, slot_blocks)
    fill_pairs(query_tile, kv_tile, window, query_len, num_computed, rows, table, pair_tile, pair_start, pair_blocks)


@compiled
def fill_slots(
    block_size: int,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    slot_blocks: np.ndarray,
) -> None:
    """The block that each token's key and value go to; padding goes to the null block."""
    token = 0
    for request in range(len(query_len)):
        row = rows[request]
        block = num_computed[request] // block_size
        offset = num_computed[request] - block * block_size
        for _ in range(query_len[request]):
            if offset == block_size:
                block, offset = block + 1, 0
            slot_blocks[token] = table[row, block]
            offset += 1
            token += 1
    slot_blocks[token:] = 0


@compiled
def fill_pairs(
    query_tile: int,
    kv_tile: int,
    window: int,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    pair_tile: np.ndarray,
    pair_start: np.ndarray,
    pair_blocks: np.ndarray,
) -> None:
    """Each pair's query tile, the first position of its KV tile, and that one's blocks [NP, B].

    Padding pairs are seen by nothing, so they keep the tiles and blocks of an earlier step.
    """
    width = pair_blocks.shape[1]
    all_blocks = pair_blocks.reshape(-1)
    tile = pair = 0
    for request in range(len(query_len)):
        row_blocks = table[rows[request]]
        for first in range(0, query_len[request], query_tile):
            length = min(query_tile, query_len[request] - first)
            start, stop = kv_tiles_of(num_computed[request] + first, length, kv_tile, window)
            end = pair + stop - start
            # As slices, which the compiler fills several places at a time.
            tiles, starts = pair_tile[pair:end], pair_start[pair:end]
            for index in range(stop - start):
                tiles[index] = tile
                starts[index] = (start + index) * kv_tile
            blocks, seen = all_blocks[pair * width : end * width], row_blocks[start * width : stop * width]
            for index in range(len(blocks)):
                blocks[index] = seen[index]
            pair = end
            tile += 1
    # Behind the first padding there is nothing else: no step of this size has reached so far, and a buffer of zeros was
    # padded to its end. So whoever adds pairs leaves no padding between them.
    while pair < len(pair_start) and pair_start[pair] != FAR:
        pair_start[pair] = FAR
        pair += 1


@compiled
def fill_merge_tree(trees: tuple[np.ndarray, ...], pairs_per_tile: np.ndarray, num_pairs: int) -> None:
    """The merge tree of pure decode: for each level an array [nodes, FAN_IN] of node indices of the level below.

    The last index of every level is a neutral node, to which all padding points.

    Args:
        trees: padded, as long as ``PlanGeometry.level_sizes`` says.
        num_pairs: padded number of pairs.
    """
    counts = pairs_per_tile
    neutral = num_pairs - 1
    for tree in trees:
        counts = fill_level(tree, counts, neutral)
        neutral = len(tree) - 1


@compiled
def fill_level(tree: np.ndarray, counts: np.ndarray, neutral: int) -> np.ndarray:
    """One level of the merge tree, [nodes, FAN_IN]: ``counts`` [NT] are each tile's nodes below, returned those on it.

    What a tile has below lies side by side; all that is left over points to ``neutral``.
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
    """The merge tree of a mixed step, to which nothing is ever added: for each level, [nodes + 1], the first child of
    each node, whose children end where the next one's begin; padding has none."""
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


@compiled
def fill_tiles(query_tile: int, query_len: np.ndarray, tile_starts: np.ndarray, token_slots: np.ndarray) -> None:
    """The first token of each tile [NT + 1], which ends where the next one begins, and where in the flattened tiles
    each token lies; padding tiles are empty."""
    tile = token = 0
    for length in query_len:
        for first in range(0, length, query_tile):
            tile_starts[tile] = token
            for index in range(min(query_tile, length - first)):
                token_slots[token] = tile * query_tile + index
                token += 1
            tile += 1
    tile_starts[tile:] = token
    token_slots[token:] = 0
