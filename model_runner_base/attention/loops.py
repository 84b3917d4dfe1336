"""The loops of the attention plan: over query tiles, pairs and nodes of the merge tree."""

import numpy as np

from model_runner_base.host_loops import compiled

FAN_IN = 8
FAR = 1 << 29
"""Start of a pair whose positions lie behind what any token sees."""


@compiled
def first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that a token sees (see ``KeyRange``)."""
    if window:
        return max(0, position - window + 1)
    if chunk:
        return position // chunk * chunk
    return 0


@compiled
def last_seen(position: int, request_end: int, window: int, is_whole: bool) -> int:
    """The last position that a token sees of a request whose tokens end before ``request_end`` (see ``KeyRange``)."""
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
    """The first KV tile that a query tile, from ``position`` to before ``end``, sees, and the one behind its last.

    ``span_first`` and ``span_last`` are what its tokens also see, by their spans; they may be empty.
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
    """Fills in the pairs of each query tile; returns how many tiles and pairs there are.

    ``span_first`` and ``span_last`` are those of all tokens, or empty.
    """
    tile = num_pairs = token = 0
    for request in range(len(query_len)):
        first, request_end = num_computed[request], num_computed[request] + query_len[request]
        while first < request_end:
            end = min(first + query_tile, request_end)
            behind_tile = token + end - first
            spans = span_first[token:behind_tile], span_last[token:behind_tile]
            start, stop = kv_tiles_of(first, end, request_end, kv_tile, window, chunk, is_whole, *spans)
            pairs_per_tile[tile] = stop - start
            num_pairs += stop - start
            tile += 1
            first, token = end, behind_tile
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
    """Each pair's query tile, the first position of its KV tile, and that one's blocks [NP, B].

    Padding pairs are seen by nothing, so they keep the tiles and blocks of an earlier step. The last pair is always
    padding, and its blocks are the null block: what padding tiles name as theirs.
    """
    width = pair_blocks.shape[1]
    all_blocks = pair_blocks.reshape(-1)
    tile = pair = token = 0
    for request in range(len(query_len)):
        row_blocks = table[rows[request]]
        first, request_end = num_computed[request], num_computed[request] + query_len[request]
        while first < request_end:
            end = min(first + query_tile, request_end)
            behind_tile = token + end - first
            spans = span_first[token:behind_tile], span_last[token:behind_tile]
            start, stop = kv_tiles_of(first, end, request_end, kv_tile, window, chunk, is_whole, *spans)
            behind = pair + stop - start
            # As slices, which the compiler fills several places at a time.
            tiles, starts = pair_tile[pair:behind], pair_start[pair:behind]
            for index in range(stop - start):
                tiles[index] = tile
                starts[index] = (start + index) * kv_tile
            blocks, seen = all_blocks[pair * width : behind * width], row_blocks[start * width : stop * width]
            for index in range(len(blocks)):
                blocks[index] = seen[index]
            pair = behind
            tile += 1
            first, token = end, behind_tile
    # Behind the first padding there is nothing else: no step of this size has reached so far, and a buffer of zeros was
    # padded to its end. So whoever adds pairs leaves no padding between them.
    while pair < len(pair_start) and pair_start[pair] != FAR:
        pair_start[pair] = FAR
        pair += 1


@compiled
def fill_merge_tree(trees: tuple[np.ndarray, ...], pairs_per_tile: np.ndarray, num_pairs: int) -> None:
    """The merge tree of a step of pure decode: for each level [nodes, FAN_IN], node indices of the level below.

    The last index of every level is a neutral node, to which all padding points.

    Args:
        trees: padded, as long as ``PairGeometry.level_sizes`` says.
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
