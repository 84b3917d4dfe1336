"""Every step that the scheduler's limits allow fits a captured size, so that nothing is ever compiled later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.plan import PlanGeometry, make_plan
from model_runner_base.graph_policy import (
    BucketPolicy,
    GraphPolicy,
    GraphSize,
    NoGraphSizeError,
    StepLimits,
    geometric,
    step_cost,
)
from model_runner_base.size_placement import expect_steps, place_sizes
from neuron_runner.config import NeuronConfig
from neuron_runner.graph_policy import OpenXlaPolicy


@st.composite
def limits_and_steps(draw: st.DrawFn) -> tuple[StepLimits, list[tuple[int, int]]]:
    """Limits, and one step within them: scheduled and cached tokens of each request."""
    max_tokens = draw(st.integers(1, 300))
    max_reqs = draw(st.integers(1, max_tokens))
    max_length = draw(st.integers(1, 700))
    limits = StepLimits(max_tokens, max_reqs, max_length, draw(st.sampled_from([4, 16])), 64)
    steps = []
    left = max_tokens
    for _ in range(draw(st.integers(1, min(max_reqs, 12)))):
        if left == 0:
            break
        scheduled = draw(st.integers(1, min(left, max_length)))
        steps.append((scheduled, draw(st.integers(0, max_length - scheduled))))
        left -= scheduled
    return limits, steps


def cost(size: GraphSize) -> float:
    return float(step_cost(np.array(size)))


@given(
    limits_and_steps(),
    st.sets(st.sampled_from(["num_batched_tokens_buckets", "num_seqs_buckets", "context_length_buckets"])),
    st.sampled_from([0.05, 0.12, 0.9]),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([None, 1, 50]),
)
@settings(max_examples=120, deadline=None)
def test_every_step_within_the_limits_fits(
    case: tuple[StepLimits, list[tuple[int, int]]],
    given_lists: set[str],
    max_padding: float,
    block_size: int,
    window: int | None,
) -> None:
    limits, steps = case
    lists = {
        "num_batched_tokens_buckets": sorted({max(1, limits.max_num_tokens // 3), limits.max_num_tokens}),
        "num_seqs_buckets": [limits.max_num_reqs],
        "context_length_buckets": sorted({max(1, limits.max_model_len // 2), limits.max_model_len}),
    }
    policy = OpenXlaPolicy(NeuronConfig(max_padding=max_padding, **{name: lists[name] for name in given_lists}))
    policy.configure(limits)
    query_len, computed = np.array(steps).T
    num_tokens, num_reqs = int(query_len.sum()), len(steps)
    query_tile = 1 if num_tokens == num_reqs else limits.query_tile
    geometry = PlanGeometry(block_size, 64, limits.max_kv_tiles, window)
    plan = make_plan(geometry, query_tile, query_len, computed)
    need = GraphSize(query_tile, num_tokens, num_reqs, plan.num_tiles, plan.num_pairs + 1)
    size = policy.dispatch(need)
    assert size in policy.sizes and size.holds(need)
    assert cost(size) == min(cost(s) for s in policy.sizes if s.holds(need)), "a cheaper size was passed over"


def test_dispatch_takes_the_cheapest_not_the_first() -> None:
    policy = BucketPolicy()
    few_rows_many_pairs, many_rows_few_pairs = GraphSize(1, 8, 8, 8, 257), GraphSize(1, 16, 16, 16, 33)
    policy.set_sizes([few_rows_many_pairs, many_rows_few_pairs, GraphSize(16, 64, 16, 20, 65)])
    assert policy.dispatch(GraphSize(1, 5, 5, 5, 20)) == many_rows_few_pairs
    assert policy.dispatch(GraphSize(1, 5, 5, 5, 40)) == few_rows_many_pairs
    with pytest.raises(NoGraphSizeError, match="no captured size holds"):
        policy.dispatch(GraphSize(16, 64, 17, 20, 65))


def test_lists_that_the_user_gives_are_the_sizes() -> None:
    limits = StepLimits(64, 8, 1000, 16, 256)
    policy = OpenXlaPolicy(NeuronConfig(num_seqs_buckets=[3, 8], num_batched_tokens_buckets=[24, 64]))
    policy.configure(limits)
    decode = [size for size in policy.sizes if size.query_tile == 1]
    assert {size[1:] for size in decode} == {(n, n, n, n * tiles + 1) for n in (3, 8) for tiles in (1, 2, 4)}
    assert {size.num_tokens for size in policy.sizes if size.query_tile != 1} == {24, 64}
    policy = OpenXlaPolicy(NeuronConfig(context_length_buckets=[300, 1000]))
    policy.configure(limits)
    assert {size[1:] for size in policy.sizes if size.query_tile == 1} == {
        (n, n, n, n * tiles + 1) for n in (1, 2, 4, 8) for tiles in (2, 4)
    }


def test_powers_of_two_end_at_the_limits() -> None:
    lists = ("num_batched_tokens_buckets", "num_seqs_buckets", "context_length_buckets")
    policy = OpenXlaPolicy(NeuronConfig(**dict.fromkeys(lists, "powers_of_two")))
    policy.configure(StepLimits(600, 6, 700, 16, 64))
    assert {size.num_tokens for size in policy.sizes if size.query_tile != 1} == {128, 256, 512, 600}
    assert {(size.num_reqs, (size.num_pairs - 1) / size.num_reqs) for size in policy.sizes if size.query_tile == 1} == {
        (n, tiles) for n in (1, 2, 4, 6) for tiles in (2, 4, 8, 11)
    }


@pytest.mark.parametrize("limits", [StepLimits(512, 64, 2048, 16, 256), StepLimits(64, 4, 256, 16, 256)])
def test_placed_sizes_keep_the_padding_that_was_asked_for(limits: StepLimits) -> None:
    """Counted again step by step, through the dispatch."""
    steps = expect_steps(limits)
    work = float(steps.frequency @ step_cost(steps.sizes))
    counts = []
    for max_padding in (0.4, 0.2, 0.12):
        policy = BucketPolicy()
        policy.set_sizes(place_sizes(limits, max_padding))
        paid = sum(
            frequency * cost(policy.dispatch(GraphSize(*need)))
            for need, frequency in zip(steps.sizes.tolist(), steps.frequency, strict=True)
        )
        assert paid * (1 - max_padding) <= work * (1 + 1e-9)
        assert {GraphSize(1, 1, 1, 1, 2), *limits.largest_sizes} <= set(policy.sizes)
        counts.append(len(policy.sizes))
    assert counts == sorted(counts) and counts[-1] < 80


@given(limits_and_steps())
@settings(max_examples=30, deadline=None)
def test_expected_steps_lie_within_the_limits(case: tuple[StepLimits, list[tuple[int, int]]]) -> None:
    limits, _ = case
    decode, mixed = limits.largest_sizes
    for need in map(GraphSize._make, expect_steps(limits).sizes.tolist()):
        assert decode.holds(need) or mixed.holds(need)
        assert need.num_pairs > need.num_tiles >= need.num_reqs >= 1 and need.num_tokens >= need.num_reqs


def test_eager_runs_at_the_size_it_has() -> None:
    need = GraphSize(16, 37, 3, 5, 9)
    assert GraphPolicy().dispatch(need) == need


@pytest.mark.parametrize(
    ("args", "expected"),
    [((1, 8), [1, 2, 4, 8]), ((32, 100), [32, 64, 100]), ((32, 20), [20]), ((8, 64, 4), [8, 32, 64])],
)
def test_geometric(args: tuple[int, ...], expected: list[int]) -> None:
    assert geometric(*args) == expected
