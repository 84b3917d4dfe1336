"""The loops of the attention plan: over query tiles, pairs, tokens and nodes of the merge tree."""

import numpy as np

from model_runner_base.host_loops import compiled

FAN_IN = 8
MASKED = -(1 << 30)
"""Offset that puts every position of a pair behind the causal mask."""


@compiled
def list_pairs(
    query_tile: int,
    kv_tile: int,
    window: int,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    tiled_table: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of an ``AttentionPlan`` in its order.

    ``window`` is 0 if there is none; ``tiled_table`` is [rows, KV tiles, blocks a tile].
    """
    num_tiles = 0
    for length in query_len:
        num_tiles += (length + query_tile - 1) // query_tile
    tile_start = np.empty(num_tiles, np.int64)
    tile_len = np.empty(num_tiles, np.int64)
    pairs_per_tile = np.empty(num_tiles, np.int64)
    first_kv_tile = np.zeros(num_tiles, np.int64)
    tile = num_pairs = 0
    for request in range(len(query_len)):
        for first in range(0, query_len[request], query_tile):
            position = num_computed[request] + first
            length = min(query_tile, query_len[request] - first)
            if window:
                first_kv_tile[tile] = max(0, position - window + 1) // kv_tile
            tile_start[tile] = query_start[request] + first
            tile_len[tile] = length
            pairs_per_tile[tile] = (position + length - 1) // kv_tile + 1 - first_kv_tile[tile]
            num_pairs += pairs_per_tile[tile]
            tile += 1

    blocks_per_tile = tiled_table.shape[2]
    pair_tile = np.empty(num_pairs, np.int32)
    pair_offset = np.empty(num_pairs, np.int32)
    pair_blocks = np.empty((num_pairs, blocks_per_tile), np.int32)
    tile = pair = 0
    for request in range(len(query_len)):
        row = rows[request]
        for first in range(0, query_len[request], query_tile):
            position = num_computed[request] + first
            for kv in range(first_kv_tile[tile], first_kv_tile[tile] + pairs_per_tile[tile]):
                pair_tile[pair] = tile
                pair_offset[pair] = position - kv * kv_tile
                for block in range(blocks_per_tile):
                    pair_blocks[pair, block] = tiled_table[row, kv, block]
                pair += 1
            tile += 1
    return tile_start, tile_len, pairs_per_tile, pair_tile, pair_offset, pair_blocks


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
    tree[node:] = neutral
    return num_nodes


@compiled
def fill_slots(
    token_rows: np.ndarray,
    positions: np.ndarray,
    table: np.ndarray,
    block_size: int,
    slot_blocks: np.ndarray,
    slot_offsets: np.ndarray,
) -> None:
    """Where each token's key and value go; padding goes to the null block."""
    for token in range(len(positions)):
        block = positions[token] // block_size
        slot_blocks[token] = table[token_rows[token], block]
        slot_offsets[token] = positions[token] - block * block_size
    slot_blocks[len(positions) :] = 0
    slot_offsets[len(positions) :] = 0


@compiled
def fill_pair_ends(pair_tile: np.ndarray, pair_offset: np.ndarray, tile_len: np.ndarray, pair_last: np.ndarray) -> None:
    """The position of each pair's last token in its KV tile."""
    for pair in range(len(pair_tile)):
        pair_last[pair] = pair_offset[pair] + tile_len[pair_tile[pair]] - 1
    pair_last[len(pair_tile) :] = MASKED


@compiled
def fill_tiles(tile_start: np.ndarray, tile_len: np.ndarray, tile_tokens: np.ndarray, token_slots: np.ndarray) -> None:
    """The tokens of each tile [NT, Q], and where in the flattened tiles each token lies; 0 is padding."""
    token_slots[:] = 0
    width = tile_tokens.shape[1]
    for tile in range(len(tile_start)):
        for index in range(width):
            token = tile_start[tile] + index
            if index < tile_len[tile]:
                tile_tokens[tile, index] = token
                token_slots[token] = tile * width + index
            else:
                tile_tokens[tile, index] = 0
    tile_tokens[len(tile_start) :] = 0
