"""Trace of an attention plan: the keys that each token sees, according to the metadata."""

import numpy as np

from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.step.trace import LayerTrace, SeenKeys


def plan_trace(metadata: PagedAttentionMetadata, blocks_per_kv_block: int) -> LayerTrace:
    """Trace made from metadata on the host; ``blocks_per_kv_block`` is that of the ``BlockTable``.

    Raises ValueError where a plan contradicts itself.
    """
    decode, chunks, rows = metadata.decode, metadata.chunks, metadata.num_decode_tokens
    seen = []
    if decode is not None:
        seen += _seen(decode, rows, blocks_per_kv_block)
    if chunks is not None:
        seen += _seen(chunks, len(metadata.slot_offsets) - rows, blocks_per_kv_block)
    slots = metadata.slot_blocks.numpy().astype(np.int64) * metadata.block_size + metadata.slot_offsets.numpy()
    return LayerTrace(slots, seen)


def _seen(plan: PairPlan, num_tokens: int, blocks_per_kv_block: int) -> list[SeenKeys]:
    """Keys that each of a plan's tokens sees."""
    size = plan.block_size
    last, pair_tile = plan.last.numpy(), plan.pair_tile.numpy()
    starts = np.zeros_like(pair_tile) if plan.pair_start is None else plan.pair_start.numpy()
    first = np.zeros_like(last) if plan.first is None else plan.first.numpy()
    if plan.pair_blocks is None:
        # Each cache line is a tile with one pair; the null line comes before the first.
        lines = np.arange(len(pair_tile))
        blocks = (1 + lines[:, None]) * blocks_per_kv_block + np.arange(plan.line_tiles)
        tile_tokens, pair_tile = pair_tile[:, None] * last.shape[1] + np.arange(last.shape[1]), lines
    else:
        blocks = plan.pair_blocks.numpy()
        if plan.tile_tokens is not None:
            tile_tokens = plan.tile_tokens.numpy()
        else:
            tile_tokens = np.arange(num_tokens).reshape(-1, last.shape[1])
    position = np.arange(blocks.shape[1] * size)
    tile_slots = np.arange(num_tokens) if plan.tile_slots is None else plan.tile_slots.numpy()
    query_tile = tile_tokens.shape[1]
    # The pairs that each node of the merge tree adds up, from the leaves up. Pairs that no query sees are neutral.
    nodes = [[pair] if (last[pair] >= 0).any() else [] for pair in range(len(pair_tile))]
    for tree in plan.merge_tree:
        nodes = [[pair for child in children for pair in nodes[child]] for children in tree.tolist()]
    if plan.pair_blocks is not None:
        _check_sums(plan, nodes)
    seen = []
    for token in range(num_tokens):
        tile, index = divmod(int(tile_slots[token]), query_tile)
        if tile_tokens[tile, index] != token:
            seen.append(SeenKeys(np.zeros(0, np.int64), np.zeros(0, np.int64)))  # Padding.
            continue
        keys, slots = [position[:0]], [position[:0]]
        for pair in nodes[tile]:
            if pair_tile[pair] != tile:
                raise ValueError(f"tile {tile} adds up a pair of tile {pair_tile[pair]}")
            visible = position[(position >= first[pair, index]) & (position <= last[pair, index])]
            keys.append(starts[pair] + visible)
            slots.append(blocks[pair, visible // size].astype(np.int64) * size + visible % size)
        every = np.concatenate(keys)
        order = np.argsort(every, kind="stable")
        seen.append(SeenKeys(every[order], np.concatenate(slots)[order]))
    return seen


def _check_sums(plan: PairPlan, nodes: list[list[int]]) -> None:
    """Raises ValueError if the merge tree has other pairs of a tile than the plan.

    Plain attention adds up the results of a tile's pairs. Chunks take maxima by the tree, and kernels may merge by it,
    so both must cover the same pairs.
    """
    pair_tile, is_seen = plan.pair_tile.numpy(), (plan.last.numpy() >= 0).any(axis=1)
    for tile, pairs in enumerate(nodes):
        added = np.flatnonzero((pair_tile == tile) & is_seen).tolist()
        if pairs != added:
            raise ValueError(f"tile {tile} adds up pairs {added}, and takes the maximum of {pairs}")
