"""Steps that the scheduler's limits allow all fit a captured size, so that nothing is ever compiled later."""

from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from attention_cases import KEY_RANGES, batch_of
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.plan import KeyRange, kv_tile_for
from model_runner_base.caches.attention_groups import whole_blocks
from model_runner_base.caches.contiguous import ContiguousDecode, contiguous_sizes
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.graph_policy import BucketPolicy, GraphPolicy, NoGraphSizeError
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import (
    COMMON_DIMS,
    Dim,
    StepKind,
    StepLimits,
    StepSize,
    Tiling,
    cost_of,
    first_that_holds,
    geometric,
)
from neuron_runner.config import NeuronConfig
from neuron_runner.graph_policy import OpenXlaPolicy
from neuron_runner.size_placement import expect_steps, place_sizes


def limits_of(tokens: int, requests: int, length: int, chunk_query: int, keys: int, lines: int = 0) -> StepLimits:
    decode, chunk = Tiling(1, keys), Tiling(chunk_query, 2 * keys)
    return StepLimits(tokens, requests, length, decode, chunk, (*COMMON_DIMS, *plan_dims(decode, chunk)), lines)


def row_of(size: StepSize) -> np.ndarray:
    return np.array(size.as_row())


Steps = list[tuple[int, int]]
"""Scheduled and cached tokens of each request."""


@st.composite
def limits_and_steps(draw: st.DrawFn) -> tuple[StepLimits, Steps]:
    """Limits, and one step within them."""
    max_tokens = draw(st.integers(1, 300))
    max_reqs = draw(st.integers(1, max_tokens))
    max_length = draw(st.integers(1, 700))
    lines = draw(st.sampled_from([0, 0, draw(st.integers(1, max_reqs))]))
    limits = limits_of(max_tokens, max_reqs, max_length, draw(st.sampled_from([4, 16, 64])), 64, lines)
    arrivals = draw(st.sampled_from([None, None, draw(st.integers(1, max_reqs))]))
    limits = replace(limits, max_arrivals=arrivals)
    steps: Steps = []
    left = max_tokens
    longest = draw(st.sampled_from([1, max_length]))
    for _ in range(draw(st.integers(1, min(lines or max_reqs, 12)))):
        if left == 0:
            break
        may_have_chunk = arrivals is None or sum(scheduled > 1 for scheduled, _ in steps) < arrivals
        scheduled = draw(st.integers(1, min(left, longest if may_have_chunk else 1)))
        steps.append((scheduled, draw(st.integers(0, max_length - scheduled))))
        left -= scheduled
    return limits, steps


def needs_of(limits: StepLimits, steps: Steps, block_size: int, key_range: KeyRange) -> list[StepSize]:
    """Sizes that the caches ask for."""
    query_len, computed = np.array(sorted(steps, key=lambda step: step[0] > 1)).T
    keys, chunk_keys = limits.decode.keys, limits.chunk.keys
    table = BlockTable(len(steps), limits.max_model_len, block_size, lcm(keys, chunk_keys) // block_size)
    group = AttentionGroup(["layer"], table, keys, chunk_keys, key_range)
    kinds: list[CacheKind] = [PagedCaches([group], limits)]
    if limits.num_lines:
        kinds.append(ContiguousDecode([group], limits))
    return make_layout(kinds, limits).needs(batch_of(query_len, computed, np.arange(len(steps))))


@given(
    limits_and_steps(),
    st.sets(st.sampled_from(["num_batched_tokens_buckets", "num_seqs_buckets", "context_length_buckets"])),
    st.sampled_from([0.05, 0.12, 0.9, 1]),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from(KEY_RANGES),
)
@settings(max_examples=examples(80), deadline=None)
def test_every_step_within_the_limits_fits(
    case: tuple[StepLimits, Steps], given_lists: set[str], max_padding: float, block_size: int, key_range: KeyRange
) -> None:
    limits, steps = case
    lists = {
        "num_batched_tokens_buckets": sorted({max(1, limits.max_num_tokens // 3), limits.max_num_tokens}),
        "num_seqs_buckets": [limits.max_num_reqs],
        "context_length_buckets": sorted({max(1, limits.max_model_len // 2), limits.max_model_len}),
    }
    policy = OpenXlaPolicy(NeuronConfig(max_padding=max_padding, **{name: lists[name] for name in given_lists}))
    policy.configure(limits)
    needs = needs_of(limits, steps, block_size, key_range)
    assert len(needs) == 1 + (limits.num_lines > 0 and all(count == 1 for count, _ in steps))
    sizes = [policy.dispatch(need) for need in needs]
    for need, size in zip(needs, sizes, strict=True):
        named = limits.named(need)
        assert need.kind == (StepKind.DECODE if all(count == 1 for count, _ in steps) else StepKind.MIXED) or (
            need.kind == StepKind.DECODE_CONTIGUOUS
        )
        assert named["requests"] >= len(steps) and named["tokens"] >= sum(count for count, _ in steps)
        assert size in policy.sizes and size.holds(need)
        held = [other for other in policy.sizes if other.holds(need)]
        assert policy.cost(size) == min(map(policy.cost, held)), "a cheaper size was passed over"
    assert policy.choose(needs) == min(sizes, key=policy.cost)


@given(limits_and_steps(), st.sampled_from([1, 4, 16, 64]), st.sampled_from(KEY_RANGES))
@settings(max_examples=examples(60), deadline=None)
def test_largest_sizes_hold_every_step(case: tuple[StepLimits, Steps], block_size: int, key_range: KeyRange) -> None:
    """A device without a list of sizes goes by the largest: memory is estimated, and warmed up, at these."""
    limits, steps = case
    need, *by_lines = needs_of(limits, steps, block_size, key_range)
    assert limits.largest_sizes[need.kind].holds(need)
    assert all(any(size.holds(each) for size in contiguous_sizes(limits)) for each in by_lines)


def test_where_all_may_be_padding_the_largest_sizes_are_alone() -> None:
    limits = limits_of(512, 64, 4096, 16, 64)
    assert place_sizes(limits, 1) == limits.largest_sizes


@pytest.mark.parametrize("max_padding", [0.2, 0.5, 1])
def test_sizes_where_no_request_decodes(max_padding: float) -> None:
    """Mixed sizes alone, with one decode row, which is padding; they hold every step of prompts."""
    limits, rng = replace(limits_of(512, 64, 4096, 16, 64), decodes=False), np.random.default_rng(0)
    sizes = place_sizes(limits, max_padding)
    assert {size.kind for size in sizes} == {StepKind.MIXED}
    assert {limits.named(size)["decode_rows"] for size in sizes} == {1}
    for _ in range(100):
        num_chunks = int(rng.integers(1, 65))
        num_tokens = int(rng.integers(num_chunks, 513))
        tiles = limits.num_tiles(num_tokens, num_chunks)
        need = limits.mixed_size(0, 0, num_tokens, num_chunks, tiles * limits.max_chunk_kv_tiles, tiles)
        assert any(size.holds(need) for size in sizes)


def test_dispatch_takes_the_cheapest_not_the_first() -> None:
    limits = limits_of(512, 64, 4096, 16, 64)
    policy = BucketPolicy()
    policy.configure(limits)
    few_rows_many_pairs, many_rows_few_pairs = limits.decode_size(8, 256), limits.decode_size(16, 32)
    mixed = limits.mixed_size(16, 64, 64, 16, 64)
    policy.set_sizes([few_rows_many_pairs, many_rows_few_pairs, mixed])
    assert policy.dispatch(limits.decode_size(5, 19)) == many_rows_few_pairs
    assert policy.dispatch(limits.decode_size(5, 39)) == few_rows_many_pairs
    assert policy.choose([limits.decode_size(5, 39), limits.decode_size(16, 32)]) == many_rows_few_pairs
    assert policy.dispatch(limits.mixed_size(16, 64, 64, 16, 64)) == mixed
    with pytest.raises(NoGraphSizeError, match=r"no captured size holds a step of mixed: 81 tokens, .* 17 decode_rows"):
        policy.dispatch(limits.mixed_size(17, 64, 64, 16, 64))


SIZES = st.integers(3, 9).flatmap(
    lambda width: st.tuples(
        st.lists(
            st.tuples(st.sampled_from(list(StepKind)), st.tuples(*[st.integers(0, 6)] * width)), min_size=2, max_size=12
        ),
        st.lists(st.tuples(*[st.sampled_from([0.0, 0.2, 1.0, 3.5])] * 3), min_size=width, max_size=width),
    )
)


@given(SIZES)
@settings(deadline=None)
def test_any_number_of_dims_and_any_costs(case: tuple[list[tuple[StepKind, tuple[int, ...]]], list[tuple]]) -> None:
    """A size holds another of its kind that is nowhere larger; buckets are tried from the cheapest on."""
    drawn, costs = case
    names = ["tokens", "requests", "logits", *(f"dim {index}" for index in range(len(costs) - 3))]
    dims = tuple(Dim(name, cost) for name, cost in zip(names, costs, strict=True))
    limits = StepLimits(99, 9, 99, Tiling(1, 64), Tiling(64, 64), dims)
    need, *sizes = (StepSize(*each) for each in drawn)

    def cost(size: StepSize) -> float:
        return sum(number * cost[size.kind] for number, cost in zip(size.dims, costs, strict=True))

    table = np.array([size.as_row() for size in sizes], np.int64).reshape(len(sizes), -1)
    assert cost_of(table, dims).tolist() == pytest.approx([cost(size) for size in sizes])
    holding = [index for index, size in enumerate(sizes) if size.kind == need.kind and min(size.dims) >= 0]
    holding = [index for index in holding if all(a >= b for a, b in zip(sizes[index].dims, need.dims, strict=True))]
    assert [index for index, size in enumerate(sizes) if size.holds(need)] == holding
    assert first_that_holds(table, int(need.kind), need.dims) == (holding[0] if holding else -1)
    assert (need.num_tokens, need.num_reqs, need.num_logits) == need.dims[:3]
    named = limits.named(need)
    assert list(named.items()) == list(zip(names, need.dims, strict=True)) and named["no dim of these"] == 0
    assert limits.size(need.kind, **(named | {"no dim of these": 7})) == need
    assert limits.size(need.kind, tokens=5).dims == (5, *[0] * (len(dims) - 1))
    assert limits.but(need, tokens=5).dims == (5, *need.dims[1:])
    policy = BucketPolicy()
    policy.configure(limits)
    policy.set_sizes([*sizes, *sizes])
    assert set(policy.sizes) == set(sizes) and len(policy.sizes) == len(set(sizes))
    assert [policy.cost(size) for size in policy.sizes] == pytest.approx(sorted(map(cost, set(sizes))))
    if holding:
        found = policy.dispatch(need)
        assert found.holds(need) and cost(found) == pytest.approx(min(cost(sizes[index]) for index in holding))
    else:
        with pytest.raises(NoGraphSizeError):
            policy.dispatch(need)


def test_lists_that_the_user_gives_are_the_sizes() -> None:
    limits = limits_of(64, 8, 1000, 16, 256)
    policy = OpenXlaPolicy(NeuronConfig(num_seqs_buckets=[3, 8], num_batched_tokens_buckets=[24, 64]))
    policy.configure(limits)
    decode = {size for size in policy.sizes if size.kind == StepKind.DECODE}
    assert decode == {limits.decode_size(n, n * tiles) for n in (3, 8) for tiles in (1, 2, 4)}
    mixed = [limits.named(size) for size in policy.sizes if size.kind == StepKind.MIXED]
    # Tokens of chunks; with them as many decode rows as there may be requests.
    assert {(dims["chunk_tokens"], dims["decode_rows"], dims["tokens"]) for dims in mixed} == {
        (24, 8, 32),
        (64, 8, 72),
    }
    # If requests may be many, a chunk with few decode rows pays for few, and a chunk alone for the row of padding.
    many = limits_of(256, 64, 1000, 16, 64)
    policy = OpenXlaPolicy(NeuronConfig(num_batched_tokens_buckets=[100, 256]))
    policy.configure(many)
    mixed = [many.named(size) for size in policy.sizes if size.kind == StepKind.MIXED]
    assert {(dims["chunk_tokens"], dims["decode_rows"]) for dims in mixed} == {
        (tokens, rows) for tokens in (100, 256) for rows in (64, 8, 1)
    }
    policy = OpenXlaPolicy(NeuronConfig(context_length_buckets=[300, 1000]))
    policy.configure(limits)
    assert {size for size in policy.sizes if size.kind == StepKind.DECODE} == {
        limits.decode_size(n, n * tiles) for n in (1, 2, 4, 8) for tiles in (2, 4)
    }


def test_powers_of_two_end_at_the_limits() -> None:
    lists = ("num_batched_tokens_buckets", "num_seqs_buckets", "context_length_buckets")
    policy = OpenXlaPolicy(NeuronConfig(**dict.fromkeys(lists, "powers_of_two")))
    limits = limits_of(600, 6, 700, 16, 64)
    policy.configure(limits)
    decode = [limits.named(size) for size in policy.sizes if size.kind == StepKind.DECODE]
    mixed = [limits.named(size) for size in policy.sizes if size.kind == StepKind.MIXED]
    assert {dims["chunk_tokens"] for dims in mixed} == {128, 256, 512, 600}
    assert {(dims["requests"], (dims["decode_pairs"] - 1) / dims["requests"]) for dims in decode} == {
        (n, tiles) for n in (1, 2, 4, 6) for tiles in (2, 4, 8, 11)
    }


@pytest.mark.parametrize("limits", [limits_of(512, 64, 2048, 16, 256), limits_of(64, 4, 256, 16, 256)])
def test_placed_sizes_keep_the_padding_that_was_asked_for(limits: StepLimits) -> None:
    """Padding is counted again step by step, through the dispatch."""
    steps = expect_steps(limits)
    work = float(steps.frequency @ cost_of(steps.sizes, limits.dims))
    counts = []
    for max_padding in (0.4, 0.25, NeuronConfig().max_padding):
        policy = BucketPolicy()
        policy.configure(limits)
        policy.set_sizes(place_sizes(limits, max_padding))
        paid = sum(
            frequency * policy.cost(policy.dispatch(StepSize(StepKind(kind), tuple(dims))))
            for (kind, *dims), frequency in zip(steps.sizes.tolist(), steps.frequency, strict=True)
        )
        assert paid * (1 - max_padding) <= work * (1 + 1e-9)
        assert {limits.decode_size(1, 1), *limits.largest_sizes} <= set(policy.sizes)
        counts.append(len(policy.sizes))
    assert counts == sorted(counts) and counts[-1] < 60


@pytest.mark.parametrize("buckets", [None, [64, 256, 512]])
@pytest.mark.parametrize("prompts", [[20], [64], [200], [256], [512], [256, 256]])
def test_prompts_alone_pay_for_no_decode_rows(buckets: list[int] | None, prompts: list[int]) -> None:
    """Prompts without decodes, of one user or of many at once, pay for no decode row, and for at most twice their
    tokens where the sizes are the platform's own."""
    limits = limits_of(512, 64, 2048, 64, 64)
    policy = OpenXlaPolicy(NeuronConfig(num_batched_tokens_buckets=buckets))
    policy.configure(limits)
    (need,) = needs_of(limits, [(length, 0) for length in prompts], 16, KeyRange())
    size = limits.named(policy.dispatch(need))
    assert size["decode_rows"] == size["decode_pairs"] == 1
    smallest = buckets[0] if buckets else 64
    wanted = next((count for count in buckets or [] if count >= sum(prompts)), max(smallest, 2 * sum(prompts)))
    assert size["chunk_tokens"] <= wanted and size["chunk_pairs"] <= 24


def test_prompts_of_a_model_without_decodes_pay_for_their_own_pairs() -> None:
    """Sizes of a user's lists have no decode rows, and 15 short prompts get at most twice the pairs that they need."""
    limits = replace(limits_of(2048, 64, 256, 64, 64), decodes=False)
    policy = OpenXlaPolicy(NeuronConfig(num_batched_tokens_buckets=[512, 2048], num_seqs_buckets=[64]))
    policy.configure(limits)
    assert {limits.named(size)["decode_rows"] for size in policy.sizes} == {1}
    assert {limits.named(size)["decode_pairs"] for size in policy.sizes} == {1}
    (need,) = needs_of(limits, [(length, 0) for length in range(80, 200, 8)], 16, KeyRange(is_whole=True))
    got, wanted = limits.named(policy.dispatch(need)), limits.named(need)
    assert got["chunk_tokens"] == 2048 and got["chunk_pairs"] <= 2 * wanted["chunk_pairs"]


@given(limits_and_steps())
@settings(max_examples=examples(30), deadline=None)
def test_expected_steps_lie_within_the_limits(case: tuple[StepLimits, Steps]) -> None:
    limits = replace(case[0], num_lines=0)
    decode, mixed = limits.largest_sizes
    for kind, *numbers in expect_steps(limits).sizes.tolist():
        need = StepSize(StepKind(kind), tuple(numbers))
        assert (decode if kind == StepKind.DECODE else mixed).holds(need)
        dims = limits.named(need)
        assert dims["decode_pairs"] > 0 and dims["decode_rows"] >= 1
        if kind == StepKind.DECODE:
            assert dims["decode_pairs"] > dims["decode_rows"] == dims["tokens"] == dims["requests"]
        else:
            assert dims["tokens"] == dims["decode_rows"] + dims["chunk_tokens"]
            assert dims["tokens"] >= dims["requests"] >= 1
            assert dims["chunk_pairs"] > dims["chunk_tiles"] >= dims["requests"] - dims["decode_rows"]
            assert dims["chunk_tokens"] >= dims["chunk_tiles"] >= 1


def test_eager_runs_at_the_size_it_has() -> None:
    need = StepSize(StepKind.MIXED, (37, 3, 5, 9))
    assert GraphPolicy().dispatch(need) == need


@pytest.mark.parametrize(
    ("args", "expected"),
    [((1, 8), [1, 2, 4, 8]), ((32, 100), [32, 64, 100]), ((32, 20), [20]), ((8, 64, 4), [8, 32, 64])],
)
def test_geometric(args: tuple[int, ...], expected: list[int]) -> None:
    assert geometric(*args) == expected


@given(st.integers(1, 64), st.sampled_from([64, 128, 256]))
def test_tiles_of_chunks_are_whole_blocks(block_size: int, target: int) -> None:
    """A KV tile is as large as the target allows, and never empty."""
    keys = whole_blocks(block_size, target)
    assert keys % block_size == 0 and keys >= block_size and (keys <= target < keys + block_size or keys == block_size)
    assert kv_tile_for(block_size) <= max(64, block_size)


@pytest.mark.parametrize(
    ("tokens", "requests", "length"), [(512, 64, 40960), (16, 1, 64), (1, 1, 64), (8192, 256, 131072), (100, 8, 100)]
)
def test_first_sizes_of_slow_steps_serve_a_few_users(tokens: int, requests: int, length: int) -> None:
    """A lone user's decode and prompt have sizes of their own before serving begins, and every step has one."""
    policy = OpenXlaPolicy(NeuronConfig())
    limits = limits_of(tokens, requests, length, 64, 64)
    policy.configure(limits)
    few = policy.first_sizes(policy.sizes)
    policy.is_slow = True
    first = policy.first_sizes(policy.sizes)
    assert set(few) <= set(first) <= set(policy.sizes)
    assert all(any(size.holds(each) for size in first) for each in policy.sizes)
    policy.offer_only(first)
    assert policy.dispatch(limits.decode_size(1, 1)).num_tokens <= max(2, requests // 16)
    if tokens > 100:
        assert policy.dispatch(limits.mixed_size(0, 0, 50, 1, 1)).num_tokens <= 200


@pytest.mark.parametrize(("piece", "longest"), [(0, 40), (400, 40), (100, 10), (39, 0), (9, 0)])
def test_lines_are_read_as_far_as_attention_may_hold_them(piece: int, longest: int) -> None:
    """Longer contexts are read by pairs; lines of fewer than four KV tiles gain nothing."""
    limits = replace(limits_of(64, 10, 640, 16, 16, lines=10), decode_piece=piece)
    sizes = contiguous_sizes(limits)
    assert max([limits.named(size)["decode_pairs"] // 10 for size in sizes], default=0) == longest
