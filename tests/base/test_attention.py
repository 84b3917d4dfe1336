"""The attention plan against brute force, and paged attention against dense attention in float64."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from bare_step import BareStep, padded
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.key_range import CAUSAL, KeyRange
from model_runner_base.attention.loops import FAN_IN, fill_merge_tree, fill_node_starts
from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import PairGeometry
from model_runner_base.attention.trace import LayerTrace
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches, plan_dims
from model_runner_base.caches.plans import node_children
from model_runner_base.caches.spans import NO_ENDS, NO_SPANS, SentSpans, SpanEnds
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, StepSize, Tiling

MAX_LENGTH = 300
KEY_RANGES = [
    CAUSAL,
    *(KeyRange(window=width) for width in (1, 5, 40, 1000)),
    *(KeyRange(chunk=size) for size in (1, 7, 48, 1000)),
]


class Case(NamedTuple):
    """A step, and all that its plan depends on."""

    batch: InputBatch
    key_range: KeyRange
    table: BlockTable
    decode: Tiling
    chunk: Tiling
    is_on_device: np.ndarray
    """[R] bool: requests in decode whose position the device alone knows."""
    spans: Mapping[int, tuple[int, int]] = MappingProxyType({})
    """First and last of the positions that see each other, by row, for some requests with a chunk."""

    def keys_of(self, row: int, position: int) -> np.ndarray:
        """Positions of the keys that a token sees."""
        first, last = first_key(self.key_range, position), position
        begin, end = self.spans.get(row, (0, -1))
        if begin <= position <= end:
            first, last = min(first, begin), max(last, end)
        return np.arange(first, last + 1)


class CaseSpans(SentSpans):
    def __init__(self, case: Case) -> None:
        self._spans = case.spans

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        ends = SpanEnds.none(int(batch.query_len[batch.num_decodes :].sum()))
        token = 0
        for row, start, end in zip(batch.rows, batch.num_computed, batch.seq_lens, strict=True):
            if end - start == 1:
                continue
            for position in range(start, end):
                begin, last = self._spans.get(row, (0, -1))
                if begin <= position <= last:
                    ends.first[token], ends.last[token] = begin, last
                token += 1
        return ends


def first_key(key_range: KeyRange, position: int) -> int:
    """The first key that a token sees."""
    if key_range.window:
        return max(0, position - key_range.window + 1)
    return position - position % key_range.chunk if key_range.chunk else 0


def batch_of(query_len: np.ndarray, num_computed: np.ndarray, rows: np.ndarray) -> InputBatch:
    """A batch whose requests of one token come first."""
    return InputBatch(
        req_ids=[str(row) for row in rows],
        num_tokens=int(query_len.sum()),
        rows=rows,
        query_len=query_len,
        query_start=np.cumsum(query_len) - query_len,
        num_computed=num_computed,
        seq_lens=num_computed + query_len,
        is_sampled=np.ones(len(rows), bool),
        num_sampled=len(rows),
        num_decodes=int((query_len == 1).sum()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random step: block and tile sizes, key range, cached and new tokens of each request, scattered blocks.

    The step has decode rows, chunks of prompts, or both.
    """
    block_size = draw(st.sampled_from([1, 4, 16]))
    kv_tile, chunk_kv_tile = (block_size * draw(st.sampled_from(counts)) for counts in ([1, 2, 4], [1, 3, 8]))
    num_reqs = draw(st.integers(1, 5))
    num_decodes = draw(st.sampled_from([0, num_reqs, draw(st.integers(0, num_reqs))]))
    num_chunks = num_reqs - num_decodes
    chunks = draw(st.lists(st.integers(2, 60), min_size=num_chunks, max_size=num_chunks))
    num_computed = np.array(draw(st.lists(st.integers(0, 200), min_size=num_reqs, max_size=num_reqs)))
    table = BlockTable(num_reqs, MAX_LENGTH, block_size, lcm(kv_tile, chunk_kv_tile) // block_size)
    order = np.random.default_rng(draw(st.integers(0, 1000))).permutation(num_reqs * MAX_LENGTH) + 1
    for row in range(num_reqs):
        table.assign(row, order[row * MAX_LENGTH :][: -(-MAX_LENGTH // block_size)].tolist())
    batch = batch_of(np.array([1] * num_decodes + chunks), num_computed, np.arange(num_reqs)[::-1].copy())
    spans = {}
    for index in range(num_decodes, num_reqs):
        if draw(st.booleans()):
            last = draw(st.integers(int(batch.num_computed[index]), int(batch.seq_lens[index]) - 1))
            spans[int(batch.rows[index])] = draw(st.integers(0, last)), last
    return Case(
        batch=batch,
        spans=spans,
        key_range=draw(st.sampled_from(KEY_RANGES)),
        table=table,
        decode=Tiling(1, kv_tile),
        chunk=Tiling(draw(st.sampled_from([4, 16])), chunk_kv_tile),
        is_on_device=np.array(draw(st.lists(st.booleans(), min_size=num_reqs, max_size=num_reqs))),
    )


class Packed(NamedTuple):
    size: StepSize
    metadata: PagedAttentionMetadata
    trace: LayerTrace
    tokens: dict[int, tuple[int, int]]
    """(row, position) of every token, by its index in the step."""


def pack(case: Case, padding: int) -> Packed:
    """Packs the step at a size with ``padding`` to spare of everything.

    The buffer has held a step of nothing but padding, if ``padding`` is odd, and one with longer requests, and now
    holds this one.
    """
    batch, key_range, table, decode, chunk, is_on_device, spans = case
    dims = (*COMMON_DIMS, *plan_dims(decode, chunk))
    limits = StepLimits(1000, 100, MAX_LENGTH, decode, chunk, dims)
    group = AttentionGroup(["layer"], table, decode.keys, chunk.keys, key_range)
    spans_of_case = CaseSpans(case) if spans else NO_SPANS
    bare = BareStep([PagedCaches([group], limits, spans_of_case)], limits, len(table.table), MAX_LENGTH)
    longer = batch.query_len + np.where(batch.query_len > 1, padding // 2, 0)
    more = batch_of(longer, batch.num_computed + padding // 2, batch.rows)
    # Behind a window the longer requests may need fewer pairs.
    size = padded(limits, [need for step in (batch, more) for need in bare.layout.needs(step)], padding)
    if padding % 2:
        bare.fill_padding(size)
    bare.requests.num_known[batch.rows] = MAX_LENGTH
    bare.send(more, size)
    bare.requests.num_known[batch.rows] = np.where(is_on_device & (batch.query_len == 1), 0, MAX_LENGTH)
    bare.rows.tensors[1][batch.rows] = torch.from_numpy(batch.num_computed).int()
    sent = replace(batch, query_start=batch.query_start.copy())
    call = bare.run(sent, bare.send(sent, size))
    metadata = call.metadata["layer"]
    tokens, index = {}, 0
    for request, row in enumerate(batch.rows.tolist()):
        if request == batch.num_decodes:
            index = metadata.num_decode_tokens
        for position in range(batch.num_computed[request], batch.seq_lens[request]):
            tokens[index] = row, position
            index += 1
    assert {index: position for index, (_, position) in tokens.items()}.items() <= dict(
        enumerate(call.positions.tolist())
    ).items()
    return Packed(size, metadata, bare.trace(call, sent)["layer"], tokens)


def check_pairs(case: Case, plan: PairPlan, tokens: dict[int, tuple[int, int]], max_pairs: int) -> dict[int, set[int]]:
    """Keys that each of a plan's tokens sees, each listed once, in the request's own blocks."""
    count = plan.last.shape[0]
    assert count == max_pairs
    tile_tokens, token_slots = plan.tile_tokens, plan.token_slots
    query_tile = 1 if tile_tokens is None else tile_tokens.shape[1]
    members: dict[int, dict[int, int]] = defaultdict(dict)
    for token in tokens:
        slot = token if token_slots is None else int(token_slots[token])
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
        assert metadata.chunks.tile_tokens is not None and metadata.chunks.token_slots is not None
        assert metadata.chunks.tile_tokens.shape == (num_tiles, case.chunk.query)
        assert metadata.chunks.token_slots.shape == (num_chunk_tokens,)
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
        # What the kit is told of it.
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


def dense_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    key_range: KeyRange,
    cap: float | None,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    span: tuple[int, int] = (0, -1),
) -> np.ndarray:
    """One token's attention in float64: query [H, D], keys and values [length, K, D], slopes and sinks [H].

    ``span``: the first and last of positions that see each other.
    """
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
    hidden = index > position
    if key_range.window:
        hidden |= index <= position - key_range.window
    if key_range.chunk:
        hidden |= index // key_range.chunk != position // key_range.chunk
    if span[0] <= position <= span[1]:
        hidden &= (index < span[0]) | (index > span[1])
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(axis=1, keepdims=True)))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@given(
    cases(),
    st.sampled_from([(4, 4), (4, 2), (6, 1), (18, 9)]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
    st.sampled_from([None, -3.0, 3.0, 200.0]),
    st.integers(0, 40),
)
@settings(max_examples=examples(80), deadline=None)
def test_paged_attention_equals_dense(
    case: Case, heads: tuple[int, int], cap: float | None, has_slopes: bool, sink: float | None, padding: int
) -> None:
    """Paged attention equals dense attention with padding tokens, tiles and pairs, NaN in unused cache entries, and
    blocks scattered over the cache."""
    if has_slopes:
        case = case._replace(spans={})  # No model has both.
    batch, key_range, table = case.batch, case.key_range, case.table
    block_size = table.block_size
    num_heads, num_kv_heads = heads
    head_size = 8
    size, metadata, _, tokens = pack(case, padding)
    num_tokens = size.num_tokens

    rng = np.random.default_rng(0)
    num_blocks = int(table.table.max()) + 1
    # What no live token was written to may hold anything, not even a number.
    cache = torch.full((num_blocks, block_size, 2 * num_kv_heads, head_size), float("nan"))
    cache[0] = 0.0
    history = {}
    for row, length, computed in zip(batch.rows, batch.seq_lens, batch.num_computed, strict=True):
        history[row] = rng.normal(size=(length, 2 * num_kv_heads, head_size)).astype(np.float32)
        # What lies before every window may have been given to another request.
        for position in range(int(case.keys_of(row, computed)[0]), length):
            block = table.table[row, position // block_size]
            cache[block, position % block_size] = torch.from_numpy(history[row][position])
    key_value = np.zeros((num_tokens, 2 * num_kv_heads, head_size), np.float32)
    for token, (row, position) in tokens.items():
        key_value[token] = history[row][position]
        cache[table.table[row, position // block_size], position % block_size] = 1e6

    query = rng.normal(size=(num_tokens, num_heads, head_size)).astype(np.float32)
    slopes = 0.3 ** np.arange(num_heads) if has_slopes else None
    sinks = None if sink is None else sink * np.linspace(0.5, 1, num_heads)
    impl = PagedAttentionImpl(
        num_heads,
        head_size,
        head_size**-0.5,
        num_kv_heads,
        sliding_window=key_range.window or None,
        logits_soft_cap=cap,
        alibi_slopes=None if slopes is None else slopes.tolist(),
        sinks=None if sinks is None else torch.from_numpy(sinks.astype(np.float32)),
    )
    flat = torch.from_numpy(query.reshape(num_tokens, -1))
    key = torch.from_numpy(key_value[:, :num_kv_heads].reshape(num_tokens, -1))
    value = torch.from_numpy(key_value[:, num_kv_heads:].reshape(num_tokens, -1))
    before = cache.clone()
    out = impl.forward(None, flat, key, value, cache, metadata)  # type: ignore[arg-type]
    assert torch.isfinite(out).all()
    for token, (row, position) in tokens.items():
        keys, values = history[row][:, :num_kv_heads], history[row][:, num_kv_heads:]
        want = dense_attention(
            query[token], keys, values, position, key_range, cap, slopes, sinks, case.spans.get(row, (0, -1))
        )
        np.testing.assert_allclose(out[token].reshape(num_heads, head_size), want, atol=2e-5)
        place = table.table[row, position // block_size], position % block_size
        np.testing.assert_array_equal(cache[place], history[row][position])
        before[place] = cache[place]
    before[0] = cache[0]
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("num_heads", [16, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_new", [1, 5], ids=["decode", "chunk"])
def test_scores_are_not_rounded_to_the_models_dtype(num_heads: int, dtype: torch.dtype, num_new: int) -> None:
    """Scores are as precise as in kernels of vLLM's other devices; here float16 has no number for the products."""
    head_size, length = 128, 256
    num_kv_heads = num_heads // 2
    batch = batch_of(np.array([num_new]), np.array([length - num_new]), np.array([0]))
    table = BlockTable(1, length, 16, 4)
    table.assign(0, list(range(1, length // 16 + 1)))
    case = Case(batch, CAUSAL, table, Tiling(1, 64), Tiling(16, 64), np.array([False]))
    size, metadata, _, tokens = pack(case, 0)
    rng = np.random.default_rng(0)
    query = torch.from_numpy(30 * rng.normal(size=(size.num_tokens, num_heads * head_size))).to(dtype)
    history = torch.from_numpy(rng.normal(size=(length, 2 * num_kv_heads, head_size))).to(dtype)
    history[:, :num_kv_heads] *= 200 if dtype == torch.float16 else 1
    cache = torch.zeros((length // 16 + 1, 16, 2 * num_kv_heads, head_size), dtype=dtype)
    cache[1:] = history.view(-1, 16, 2 * num_kv_heads, head_size)
    new = torch.zeros((size.num_tokens, 2 * num_kv_heads, head_size), dtype=dtype)
    for token, (_, position) in tokens.items():
        new[token] = history[position]
    key, value = (new[:, heads].flatten(1) for heads in (slice(num_kv_heads), slice(num_kv_heads, None)))
    impl = PagedAttentionImpl(num_heads, head_size, head_size**-0.5, num_kv_heads)
    out = impl.forward(None, query, key, value, cache, metadata)  # type: ignore[arg-type]
    exact = history.double().numpy()
    assert len(tokens) == num_new
    for token, (_, position) in tokens.items():
        want = dense_attention(
            query[token].view(num_heads, head_size).double().numpy(),
            exact[:, :num_kv_heads],
            exact[:, num_kv_heads:],
            position,
            CAUSAL,
            None,
        )
        error = np.abs(out[token].view(num_heads, head_size).double().numpy() - want).max()
        assert error < (0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("query_tile", [1, 64])
def test_pairs_follow_the_tokens_that_exist(query_tile: int) -> None:
    """Eight rows of mixed length cost as many pairs as their tokens, not eight times those of the longest."""
    geometry = PairGeometry(block_size=16, query_tile=query_tile, kv_tile=256, max_kv_tiles=32)
    lengths = np.array([256, 512, 768, 1024, 2048, 4096, 6144, 8192])
    assert geometry.count(np.ones(8, np.int64), lengths - 1, 8, NO_ENDS).num_pairs == lengths.sum() // 256
    # A tile of a chunk costs what its own last token sees.
    chunks = geometry.count(np.full(8, 64), lengths - 64, 512, NO_ENDS)
    assert chunks.num_pairs == lengths.sum() // 256 * 64 // query_tile
