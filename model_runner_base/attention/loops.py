"""Loops of the attention plan, over query tiles, pairs and nodes of the merge tree."""

import numpy as np

from model_runner_base.step.host_loops import compiled

FAN_IN = 8
FAR = 1 << 29
"""Start of a padding pair: a position after all that any token sees."""


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
