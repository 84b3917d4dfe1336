"""The attention plan against brute force."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from attention_cases import MAX_LENGTH, Case, cases, pack
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import FAN_IN, PairGeometry, fill_merge_tree, fill_node_starts
from model_runner_base.caches.paged import node_children
from model_runner_base.caches.spans import NO_ENDS


def check_pairs(case: Case, plan: PairPlan, tokens: dict[int, tuple[int, int]], max_pairs: int) -> dict[int, set[int]]:
    """Keys that each of a plan's tokens sees, each listed once, in the request's own blocks."""
    count = plan.last.shape[0]
    assert count == max_pairs
    tile_tokens, tile_slots = plan.tile_tokens, plan.tile_slots
    query_tile = 1 if tile_tokens is None else tile_tokens.shape[1]
    members: dict[int, dict[int, int]] = defaultdict(dict)
    for token in tokens:
        slot = token if tile_slots is None else int(tile_slots[token])
        tile, index = divmod(slot, query_tile)
        assert tile_tokens is None or tile_tokens[tile, index] == token
        assert index not in members[tile], "two tokens in one place"
        members[tile][index] = token
    last = plan.last.tolist()
    first = [[0] * query_tile] * count if plan.first is None else plan.first.tolist()
    num_pairs = sum(max(row) >= 0 for row in last)
    assert num_pairs < count and max(map(max, last[num_pairs:])) < -2 * MAX_LENGTH, "padding is seen"
    assert plan.pair_last.tolist() == [max(row) for row in last]
    assert plan.first is None or plan.pair_first.tolist() == [min(row) for row in first]  # type: ignore[union-attr]
    assert plan.pair_blocks is not None
    keys_of: dict[int, set[int]] = defaultdict(set)
    for pair, tile in enumerate(plan.pair_tile[:num_pairs].tolist()):
        is_useful = False
        for index in range(query_tile):
            if index not in members[tile]:
                assert last[pair][index] < 0, "a query that is no token sees something"
                continue
            token = members[tile][index]
            row, _ = tokens[token]
            kv_start = int(plan.pair_start[pair])  # type: ignore[index]
            assert kv_start % plan.kv_tile == 0
            for key in range(max(0, first[pair][index]), min(plan.kv_tile, last[pair][index] + 1)):
                stored = plan.pair_blocks[pair, key // plan.block_size]
                assert stored == case.table.table[row, (kv_start + key) // plan.block_size]
                assert kv_start + key not in keys_of[token], "seen twice"
                keys_of[token].add(kv_start + key)
                is_useful = True
        assert is_useful, "a pair that no token needs"
    return keys_of


@given(cases(), st.integers(0, 40))
@settings(max_examples=examples(150), deadline=None)
def test_plan_lists_every_visible_key_once_and_no_idle_pair(case: Case, padding: int) -> None:
    size, metadata, trace, tokens = pack(case, padding)
    rows, table, block_size = metadata.num_decode_tokens, case.table.table, case.table.block_size
    *_, num_rows, num_pairs, num_chunk_tokens, num_tiles, num_chunk_pairs = size.dims
    assert rows == num_rows and metadata.decode is not None
    in_decode = {token: value for token, value in tokens.items() if token < rows}
    seen = check_pairs(case, metadata.decode, in_decode, num_pairs)
    assert (metadata.chunks is None) == case.batch.is_decode
    if metadata.chunks is not None:
        assert metadata.chunks.tile_tokens is not None and metadata.chunks.tile_slots is not None
        assert metadata.chunks.tile_tokens.shape == (num_tiles, case.chunk.query)
        assert metadata.chunks.tile_slots.shape == (num_chunk_tokens,)
        in_chunks = {token - rows: value for token, value in tokens.items() if token >= rows}
        found = check_pairs(case, metadata.chunks, in_chunks, num_chunk_pairs)
        seen |= {token + rows: keys for token, keys in found.items()}
    slot_blocks, slot_offsets = metadata.slot_blocks.tolist(), metadata.slot_offsets.tolist()
    assert len(slot_blocks) == len(trace.slots) == size.num_tokens
    for token, (row, position) in tokens.items():
        keys = case.keys_of(row, position)
        assert seen[token] == set(keys.tolist())
        assert slot_blocks[token] == table[row, position // block_size]
        assert slot_offsets[token] == position % block_size
        # The kit is told the same.
        slots = table[row, keys // block_size].astype(np.int64) * block_size + keys % block_size
        assert trace.slots[token] == slots[keys == position]
        np.testing.assert_array_equal(trace.seen[token].positions, keys)
        np.testing.assert_array_equal(trace.seen[token].slots, slots)
    padding_blocks = [block for token, block in enumerate(slot_blocks) if token not in tokens]
    assert not any(padding_blocks), "padding is written outside the null block"


@pytest.mark.parametrize("is_decode", [True, False])
@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 5))
@settings(max_examples=examples(100), deadline=None)
def test_merge_tree_reaches_each_pair_of_a_tile_once(
    is_decode: bool, counts: list[int], spare_pairs: int, spare_tiles: int
) -> None:
    geometry = PairGeometry(block_size=1, query_tile=1 if is_decode else 16, kv_tile=1, max_kv_tiles=100)
    num_pairs = sum(counts) + 1 + spare_pairs
    sizes = geometry.level_sizes(len(counts) + spare_tiles, num_pairs)
    if is_decode:
        levels = tuple(np.full((size, FAN_IN), -1, np.int32) for size in sizes)
        fill_merge_tree(levels, np.array(counts), num_pairs)
    else:
        starts = tuple(np.full(size + 1, -1, np.int32) for size in sizes)
        fill_node_starts(starts, np.array(counts))
        levels = tuple(tree.numpy() for tree in node_children([*map(torch.from_numpy, starts)], num_pairs))
    leaves = [{pair} for pair in range(sum(counts))] + [set()] * (num_pairs - sum(counts))
    for level in levels:
        assert level.shape[1] == FAN_IN
        merged = []
        for children in level:
            parts = [leaves[child] for child in children]
            assert sum(map(len, parts)) == len(set().union(*parts)), "a pair counted twice"
            merged.append(set().union(*parts))
        leaves = merged
    first = np.cumsum(counts) - counts
    wanted = [set(range(s, s + c)) for s, c in zip(first, counts, strict=True)] + [set()] * spare_tiles
    assert leaves == wanted


@pytest.mark.parametrize("query_tile", [1, 64])
def test_pairs_follow_the_tokens_that_exist(query_tile: int) -> None:
    """Eight rows of mixed length cost as many pairs as their tokens, not eight times those of the longest."""
    geometry = PairGeometry(block_size=16, query_tile=query_tile, kv_tile=256, max_kv_tiles=32)
    lengths = np.array([256, 512, 768, 1024, 2048, 4096, 6144, 8192])
    assert geometry.count(np.ones(8, np.int64), lengths - 1, 8, NO_ENDS).num_pairs == lengths.sum() // 256
    # A tile of a chunk costs what its own last token sees.
    chunks = geometry.count(np.full(8, 64), lengths - 64, 512, NO_ENDS)
    assert chunks.num_pairs == lengths.sum() // 256 * 64 // query_tile
