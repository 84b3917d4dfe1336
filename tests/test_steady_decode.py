"""Steady decode: a packed plan moved on in place means what the tokens that exist mean."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.paged import PagedAttentionMetadata
from model_runner_base.attention.plan import FAN_IN, PlanGeometry, make_plan
from model_runner_base.attention_metadata import PagedAttentionAdapter
from model_runner_base.batch_builder import BatchBuilder
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import InputBatch, PackedStep, in_order, token_sections
from model_runner_base.request_states import RequestStates
from model_runner_base.steady_decode import SteadyDecode

MAX_LENGTH = 320


def children_of(
    views: dict[str, np.ndarray], geometry: PlanGeometry, nodes: list[int]
) -> tuple[list[int], list[list[int]]]:
    """The pairs below nodes of the tree's top, in the order in which they are merged, and each level's node widths."""
    widths = []
    for level in reversed(range(geometry.num_levels)):
        tree = views[f"tree.0.{level}"]
        neutral = len(views["pair_tile.0"] if level == 0 else views[f"tree.0.{level - 1}"]) - 1
        children = [[child for child in tree[node].tolist() if child != neutral] for node in nodes]
        widths.append([len(siblings) for siblings in children])
        nodes = [child for siblings in children for child in siblings]
    return nodes, widths


def merged_by_eights(num_pairs: int, num_levels: int) -> list[list[int]]:
    """The node widths over so many pairs, from the top: every node is full but the last of its level."""
    widths: list[list[int]] = []
    count = num_pairs
    for _ in range(num_levels):
        nodes = -(-count // FAN_IN)
        widths.insert(0, [FAN_IN] * (nodes - 1) + [count - FAN_IN * (nodes - 1)])
        count = nodes
    return widths


def visible_keys(metadata: PagedAttentionMetadata, pairs: list[int]) -> list[tuple[int, int]]:
    """(distance behind the query, block id) of every key that a request sees in its pairs."""
    geometry, seen = metadata.geometry, []
    assert metadata.pair_blocks is not None
    for pair in pairs:
        for index in range(geometry.kv_tile):
            distance = int(metadata.pair_offset[pair]) - index
            if 0 <= distance < (geometry.window or MAX_LENGTH):
                seen.append((distance, int(metadata.pair_blocks[pair, index // geometry.block_size])))
    return seen


def decode_batch(num_computed: np.ndarray, rows: np.ndarray) -> InputBatch:
    ones = np.ones(len(rows), np.int64)
    return InputBatch(
        req_ids=[str(row) for row in rows],
        num_tokens=len(rows),
        rows=rows,
        query_len=ones,
        query_start=np.arange(len(rows)),
        num_computed=num_computed,
        seq_lens=num_computed + 1,
        is_sampled=ones.astype(bool),
        num_sampled=len(rows),
    )


def scheduled(req_ids: list[str]) -> Any:
    """What ``SteadyDecode`` reads of a scheduler's output: one token for each of the requests, nobody new."""
    return SimpleNamespace(
        total_num_scheduled_tokens=len(req_ids),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), req_ids=req_ids),
    )


@given(
    block_size=st.sampled_from([1, 2, 4]),
    blocks_per_tile=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([None, 1, 3, 9, 40]),
    lengths=st.lists(st.integers(0, MAX_LENGTH - 61), min_size=1, max_size=4),
    steps=st.integers(1, 60),
    room=st.integers(1, 40),
)
@settings(max_examples=80, deadline=None)
def test_moved_on_plan_sees_what_exists(
    block_size: int, blocks_per_tile: int, window: int | None, lengths: list[int], steps: int, room: int
) -> None:
    num_reqs = len(lengths)
    geometry = PlanGeometry(
        block_size, block_size * blocks_per_tile, -(-MAX_LENGTH // (block_size * blocks_per_tile)), window
    )
    table = BlockTable(num_reqs, MAX_LENGTH, block_size, blocks_per_tile)
    rows = np.arange(num_reqs)[::-1].copy()
    block_ids = np.random.default_rng(0).permutation(num_reqs * MAX_LENGTH).reshape(num_reqs, -1) + 1
    for row in range(num_reqs):
        table.assign(row, block_ids[row][: -(-MAX_LENGTH // block_size)].tolist())
    adapter = PagedAttentionAdapter(
        [AttentionGroup(["layer"], table, geometry)], StepLimits(100, num_reqs, MAX_LENGTH, 16, geometry.kv_tile)
    )
    batch = decode_batch(np.array(lengths), rows)
    plans = adapter.plan(batch)
    need = adapter.needed_sizes(batch, plans)[0]
    size = GraphSize(1, num_reqs + 1, num_reqs + 1, num_reqs + 1, need.num_pairs + room)
    packed = PackedStep(size, in_order([*token_sections(size), *adapter.sections(size)]))
    views = packed.views
    requests = RequestStates(num_reqs, MAX_LENGTH)
    requests.num_computed[rows] = batch.seq_lens
    builder = BatchBuilder(requests)
    builder.pack(batch, views)
    adapter.pack(batch, plans, size, views)
    steady = SteadyDecode(batch, packed, adapter.steady_plans(batch, plans, size, views), requests)

    for step in range(1, steps + 1):
        positions = np.array(lengths) + step
        if not steady.advance(scheduled(batch.req_ids)):
            fresh = make_plan(geometry, 1, batch.query_len, positions)
            # A windowed request may hold one pair that it has left behind.
            assert fresh.num_pairs + (num_reqs if window else 0) >= size.num_pairs, "there was room"
            assert (requests.num_computed[rows] == positions).all(), "the step would be counted twice"
            return
        assert (requests.num_computed[rows] == positions + 1).all()
        for name, values in [("positions", positions), ("sample_positions", positions + 1), ("token_sources", rows)]:
            assert (views[name][:num_reqs] == values).all()
        assert views["positions"][num_reqs] == views["sample_positions"][num_reqs] == 0, "padding moves"
        metadata = adapter.build(size, {name: torch.from_numpy(view) for name, view in views.items()})["layer"]
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            blocks = table.table[row]
            first = max(0, position - window + 1) if window else 0
            pairs, widths = children_of(views, geometry, [index])
            assert (views["pair_tile.0"][pairs] == index).all()
            seen = visible_keys(metadata, pairs)
            wanted = [(position - key, blocks[key // block_size]) for key in range(first, position + 1)]
            if window is None:
                assert seen == wanted
                assert widths == merged_by_eights(len(pairs), geometry.num_levels)
            else:
                assert sorted(seen) == sorted(wanted)
            assert metadata.slot_blocks[index] == blocks[position // block_size]
            assert metadata.slot_offsets[index] == position % block_size
        assert metadata.pair_offset[-1] < -MAX_LENGTH, "the neutral pair is seen"
        assert views["slot_blocks.0"][num_reqs] == 0, "padding is written outside the null block"


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 999), max_size=4), min_size=3, max_size=3).filter(any), min_size=1, max_size=8
    ),
    st.sampled_from([1, 3]),
)
@settings(deadline=None)
def test_appended_blocks_follow_those_that_a_row_has(steps: list[list[list[int]]], parts: int) -> None:
    table = BlockTable(4, 256 * parts, 2, 1, parts)
    wanted: list[list[int]] = [[7], [], [8, 9], [5]]
    for row, ids in enumerate(wanted):
        table.assign(row, ids)
    table.has_changed[:] = False
    rows = [2, 0, 1]
    for step in steps:
        table.append(rows, step)
        for row, ids in zip(rows, step, strict=True):
            wanted[row] = wanted[row] + ids
    for row, ids in enumerate(wanted):
        stored = [block_id * parts + part for block_id in ids for part in range(parts)]
        assert table.table[row, : table.num_blocks[row]].tolist() == stored
    assert table.has_changed.tolist() == [True, True, True, False]
    before = table.table.copy()
    with pytest.raises(IndexError, match="more blocks than its row"):
        table.append([0], [[1] * (table.table.shape[1] // parts + 1)])
    assert (table.table == before).all()
