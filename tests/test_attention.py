"""The attention plan against brute force, and paged attention against dense attention in float64."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.loops import FAN_IN, fill_merge_tree, fill_node_starts
from model_runner_base.attention.paged import PagedAttentionImpl, PagedAttentionMetadata
from model_runner_base.attention.plan import PlanGeometry, make_plan
from model_runner_base.attention_metadata import PagedAttentionAdapter, node_children
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import InputBatch, PackedStep, in_order, pad_into, token_sections, unpack

MAX_LENGTH = 300


@st.composite
def batches(draw: st.DrawFn) -> tuple[InputBatch, PlanGeometry, BlockTable, int]:
    """A random step: block and tile sizes, window, cached and new tokens of each request, scattered blocks."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    kv_tile = block_size * draw(st.sampled_from([1, 2, 4]))
    window = draw(st.sampled_from([None, 1, 5, 40, 1000]))
    query_tile = draw(st.sampled_from([4, 16]))
    num_reqs = draw(st.integers(1, 5))
    is_decode = draw(st.booleans())
    lengths = st.integers(1, 1 if is_decode else 60)
    query_len = np.array(draw(st.lists(lengths, min_size=num_reqs, max_size=num_reqs)))
    num_computed = np.array(draw(st.lists(st.integers(0, 200), min_size=num_reqs, max_size=num_reqs)))
    geometry = PlanGeometry(block_size, kv_tile, -(-MAX_LENGTH // kv_tile), window)
    table = BlockTable(num_reqs, MAX_LENGTH, block_size, kv_tile // block_size)
    order = np.random.default_rng(draw(st.integers(0, 1000))).permutation(num_reqs * MAX_LENGTH) + 1
    rows = np.arange(num_reqs)[::-1].copy()
    for row in range(num_reqs):
        table.assign(row, order[row * MAX_LENGTH :][: -(-MAX_LENGTH // block_size)].tolist())
    batch = InputBatch(
        req_ids=[str(i) for i in range(num_reqs)],
        num_tokens=int(query_len.sum()),
        rows=rows,
        query_len=query_len,
        query_start=np.cumsum(query_len) - query_len,
        num_computed=num_computed,
        seq_lens=num_computed + query_len,
        is_sampled=np.ones(num_reqs, bool),
        num_sampled=num_reqs,
    )
    return batch, geometry, table, 1 if batch.is_uniform_decode else query_tile


def tokens_of(batch: InputBatch) -> list[tuple[int, int]]:
    """(row, position) of every token."""
    requests = zip(batch.rows.tolist(), batch.num_computed.tolist(), batch.seq_lens.tolist(), strict=True)
    return [(row, position) for row, start, stop in requests for position in range(start, stop)]


def packed_at(
    adapter: PagedAttentionAdapter, size: GraphSize, *batches: InputBatch, is_fresh: bool = True
) -> PagedAttentionMetadata:
    """What a buffer of this size gives that held each of the batches, and before them, unless fresh, nothing but
    padding."""
    packed = PackedStep(size, in_order([*token_sections(size), *adapter.sections(size)]))
    if not is_fresh:
        adapter.pack_padding(packed.views)
    for batch in batches:
        pad_into(packed.views["positions"], np.array([position for _, position in tokens_of(batch)]), 0)
        adapter.pack(batch, adapter.plan(batch), size, packed.views)
    return adapter.build(size, unpack(torch.from_numpy(packed.buffer), packed.sections))["layer"]


def pack(
    batch: InputBatch, geometry: PlanGeometry, table: BlockTable, query_tile: int, padding: int
) -> tuple[GraphSize, PagedAttentionMetadata]:
    """The metadata at a size with ``padding`` spare tokens, tiles and pairs.

    The buffer has held a step of nothing but padding, if ``padding`` is odd, and one with longer requests, and now
    holds this one.
    """
    limits = StepLimits(1000, 100, MAX_LENGTH, max(query_tile, 2), geometry.kv_tile)
    adapter = PagedAttentionAdapter([AttentionGroup(["layer"], table, geometry)], limits)
    longer = batch.query_len + (0 if query_tile == 1 else padding // 2)
    more = replace(
        batch, num_tokens=int(longer.sum()), query_len=longer, num_computed=batch.num_computed + padding // 2
    )
    needs = [need for step in (batch, more) for need in adapter.needed_sizes(step, adapter.plan(step))]
    # Behind a window the longer requests may need fewer pairs.
    need = GraphSize(*map(max, zip(*needs, strict=True)))
    num_tokens = need.num_tokens + padding
    num_tiles = num_tokens if need.query_tile == 1 else need.num_tiles + padding
    size = GraphSize(need.query_tile, num_tokens, num_tokens, num_tiles, need.num_pairs + padding)
    assert all(size.holds(each) for each in needs)
    return size, packed_at(adapter, size, more, batch, is_fresh=padding % 2 == 0)


@given(batches(), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_plan_lists_every_visible_key_once_and_no_idle_pair(case: tuple, padding: int) -> None:
    batch, geometry, table, query_tile = case
    size, metadata = pack(*case, padding)
    tokens = tokens_of(batch)
    tile_tokens, token_slots = torch.arange(size.num_tokens)[:, None], torch.arange(size.num_tokens)
    if metadata.tile_tokens is not None and metadata.token_slots is not None:
        tile_tokens, token_slots = metadata.tile_tokens, metadata.token_slots
    assert len(set(token_slots[: len(tokens)].tolist())) == len(tokens), "two tokens in one place"
    members: dict[int, list[int]] = defaultdict(list)
    for token, slot in enumerate(token_slots[: len(tokens)].tolist()):
        assert tile_tokens[slot // query_tile, slot % query_tile] == token
        members[slot // query_tile].append(token)
    offsets, last = metadata.pair_offset.tolist(), metadata.pair_last.tolist()
    pair_of: dict[tuple[int, int], int] = {}
    num_pairs = sum(position >= 0 for position in last)
    assert num_pairs < size.num_pairs and max(offsets[num_pairs:] + last[num_pairs:]) < -2 * MAX_LENGTH, (
        "padding is seen"
    )
    assert metadata.pair_blocks is not None
    pair_blocks, slot_blocks = metadata.pair_blocks.numpy(), metadata.slot_blocks.numpy()
    for pair, tile in enumerate(metadata.pair_tile[:num_pairs].tolist()):
        useful = False
        assert last[pair] - offsets[pair] == len(members[tile]) - 1
        for index, token in enumerate(members[tile]):
            row, position = tokens[token]
            kv_start = position - index - offsets[pair]
            for key in range(kv_start, kv_start + geometry.kv_tile):
                if key <= position and (geometry.window is None or key > position - geometry.window):
                    stored = pair_blocks[pair, (key - kv_start) // geometry.block_size]
                    assert stored == table.table[row, key // geometry.block_size]
                    assert (token, key) not in pair_of, "seen twice"
                    pair_of[token, key] = pair
                    useful = True
        assert useful, "a pair that no token needs"
    for token, (row, position) in enumerate(tokens):
        first = 0 if geometry.window is None else max(0, position - geometry.window + 1)
        for key in range(first, position + 1):
            del pair_of[token, key]
        assert slot_blocks[token] == table.table[row, position // geometry.block_size]
        assert metadata.slot_offsets[token] == position % geometry.block_size
    assert not pair_of
    assert not slot_blocks[len(tokens) :].any(), "padding is written outside the null block"


@pytest.mark.parametrize("is_decode", [True, False])
@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_merge_tree_reaches_each_pair_of_a_tile_once(
    is_decode: bool, counts: list[int], spare_pairs: int, spare_tiles: int
) -> None:
    geometry = PlanGeometry(block_size=1, kv_tile=1, max_kv_tiles=100)
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


def dense_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    window: int | None,
    cap: float | None,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One token's attention in float64: query [H, D], keys and values [length, K, D], slopes and sinks [H]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), keys) / np.sqrt(query.shape[1])
    if cap:
        scores = cap * np.tanh(scores / cap)
    index = np.arange(len(keys))
    if slopes is not None:
        scores = scores + slopes[:, None] * (index - position)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
        values = np.concatenate([values, np.zeros_like(values[:1])])
        index = np.append(index, position)
    hidden = (index > position) | (index <= position - window if window else False)
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(axis=1, keepdims=True)))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@given(
    batches(),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
    st.sampled_from([None, -3.0, 3.0, 200.0]),
    st.integers(0, 40),
)
@settings(max_examples=80, deadline=None)
def test_paged_attention_equals_dense(
    case: tuple, heads: tuple[int, int], cap: float | None, has_slopes: bool, sink: float | None, padding: int
) -> None:
    """With padding tokens, tiles and pairs, NaN in unused cache entries, and blocks scattered over the cache."""
    batch, geometry, table, _ = case
    num_heads, num_kv_heads = heads
    head_size = 8
    size, metadata = pack(*case, padding)
    num_tokens = size.num_tokens

    rng = np.random.default_rng(0)
    num_blocks = int(table.table.max()) + 1
    # What no live token was written to may hold anything, not even a number.
    cache = torch.full((num_blocks, geometry.block_size, 2 * num_kv_heads, head_size), float("nan"))
    cache[0] = 0.0
    history = {}
    for row, length, computed in zip(batch.rows, batch.seq_lens, batch.num_computed, strict=True):
        history[row] = rng.normal(size=(length, 2 * num_kv_heads, head_size)).astype(np.float32)
        # What lies before every window may have been given to another request.
        for position in range(max(0, computed - geometry.window + 1) if geometry.window else 0, length):
            block = table.table[row, position // geometry.block_size]
            cache[block, position % geometry.block_size] = torch.from_numpy(history[row][position])
    new = np.stack([history[row][position] for row, position in tokens_of(batch)])
    for row, position in tokens_of(batch):
        cache[table.table[row, position // geometry.block_size], position % geometry.block_size] = 1e6

    query = rng.normal(size=(num_tokens, num_heads, head_size)).astype(np.float32)
    key_value = np.zeros((num_tokens, 2 * num_kv_heads, head_size), np.float32)
    key_value[: len(new)] = new
    slopes = 0.3 ** np.arange(num_heads) if has_slopes else None
    sinks = None if sink is None else sink * np.linspace(0.5, 1, num_heads)
    impl = PagedAttentionImpl(
        num_heads,
        head_size,
        head_size**-0.5,
        num_kv_heads,
        sliding_window=geometry.window,
        logits_soft_cap=cap,
        alibi_slopes=None if slopes is None else slopes.tolist(),
        sinks=None if sinks is None else torch.from_numpy(sinks.astype(np.float32)),
    )
    flat = torch.from_numpy(query.reshape(num_tokens, -1))
    key = torch.from_numpy(key_value[:, :num_kv_heads].reshape(num_tokens, -1))
    value = torch.from_numpy(key_value[:, num_kv_heads:].reshape(num_tokens, -1))
    out = impl.forward(None, flat, key, value, cache, metadata)  # type: ignore[arg-type]
    assert torch.isfinite(out).all()
    for token, (row, position) in enumerate(tokens_of(batch)):
        keys, values = history[row][:, :num_kv_heads], history[row][:, num_kv_heads:]
        want = dense_attention(query[token], keys, values, position, geometry.window, cap, slopes, sinks)
        np.testing.assert_allclose(out[token].reshape(num_heads, head_size), want, atol=2e-5)


@pytest.mark.parametrize("num_heads", [16, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_not_rounded_to_the_models_dtype(num_heads: int, dtype: torch.dtype) -> None:
    """As in the kernels of vLLM's other devices. Queries so long that float16 has no number for the product."""
    head_size, length = 128, 256
    num_kv_heads = num_heads // 2
    one = np.ones(1, np.int64)
    batch = InputBatch(["0"], 1, one - 1, one, one - 1, one * (length - 1), one * length, one.astype(bool), 1)
    table = BlockTable(1, length, 16, 4)
    table.assign(0, list(range(1, length // 16 + 1)))
    size, metadata = pack(batch, PlanGeometry(16, 64, length // 64), table, 1, 0)
    rng = np.random.default_rng(0)
    query = torch.from_numpy(30 * rng.normal(size=(size.num_tokens, num_heads * head_size))).to(dtype)
    history = torch.from_numpy(rng.normal(size=(length, 2 * num_kv_heads, head_size))).to(dtype)
    history[:, :num_kv_heads] *= 200 if dtype == torch.float16 else 1
    cache = torch.zeros((length // 16 + 1, 16, 2 * num_kv_heads, head_size), dtype=dtype)
    cache[1:] = history.view(-1, 16, 2 * num_kv_heads, head_size)
    key, value = (
        history[-1:, heads].reshape(1, -1).expand(size.num_tokens, -1)
        for heads in (slice(num_kv_heads), slice(num_kv_heads, None))
    )
    impl = PagedAttentionImpl(num_heads, head_size, head_size**-0.5, num_kv_heads)
    out = impl.forward(None, query, key, value, cache, metadata)[0]  # type: ignore[arg-type]
    exact = history.double().numpy()
    want = dense_attention(
        query[0].view(num_heads, head_size).double().numpy(),
        exact[:, :num_kv_heads],
        exact[:, num_kv_heads:],
        length - 1,
        None,
        None,
    )
    error = np.abs(out.view(num_heads, head_size).double().numpy() - want).max()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004)


def test_pairs_follow_the_tokens_that_exist() -> None:
    """Eight rows of mixed length cost what their tokens cost, not eight times the longest."""
    geometry = PlanGeometry(block_size=16, kv_tile=256, max_kv_tiles=32)
    lengths = np.array([256, 512, 768, 1024, 2048, 4096, 6144, 8192])
    plan = make_plan(geometry, 1, np.ones(8, np.int64), lengths - 1)
    assert plan.num_pairs == lengths.sum() // 256
