"""Every step that the scheduler's limits allow fits a captured size, so that nothing is ever compiled later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.plan import PlanGeometry, make_plan
from model_runner_base.graph_policy import GraphPolicy, GraphSize, StepLimits, geometric
from neuron_runner.config import NeuronConfig, read_neuron_config
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


@given(limits_and_steps(), st.booleans(), st.sampled_from([1, 4, 16, 64]), st.sampled_from([None, 1, 50]))
@settings(max_examples=300, deadline=None)
def test_every_step_within_the_limits_fits(
    case: tuple[StepLimits, list[tuple[int, int]]], has_lists: bool, block_size: int, window: int | None
) -> None:
    limits, steps = case
    config = NeuronConfig(
        num_batched_tokens_buckets=sorted({max(1, limits.max_num_tokens // 3), limits.max_num_tokens}),
        num_seqs_buckets=[limits.max_num_reqs],
        context_length_buckets=sorted({max(1, limits.max_model_len // 2), limits.max_model_len}),
    )
    policy = OpenXlaPolicy(config if has_lists else NeuronConfig())
    policy.configure(limits)
    query_len, computed = np.array(steps).T
    num_tokens, num_reqs = int(query_len.sum()), len(steps)
    query_tile = 1 if num_tokens == num_reqs else limits.query_tile
    geometry = PlanGeometry(block_size, 64, limits.max_kv_tiles, window)
    table = np.zeros((num_reqs, limits.max_kv_tiles * geometry.blocks_per_tile), np.int32)
    start = np.cumsum(query_len) - query_len
    plan = make_plan(geometry, query_tile, start, query_len, computed, table, np.arange(num_reqs))
    need = GraphSize(query_tile, num_tokens, num_reqs, plan.num_tiles, plan.num_pairs + 1)
    size = policy.dispatch(need)
    assert size in policy.sizes and size.holds(need)
    assert size == min(s for s in policy.sizes if s.holds(need)), "a cheaper size was passed over"


def test_eager_runs_at_the_size_it_has() -> None:
    need = GraphSize(16, 37, 3, 5, 9)
    assert GraphPolicy().dispatch(need) == need


@pytest.mark.parametrize(
    ("args", "expected"),
    [((1, 8), [1, 2, 4, 8]), ((32, 100), [32, 64, 100]), ((32, 20), [20]), ((8, 64, 4), [8, 32, 64])],
)
def test_geometric(args: tuple[int, ...], expected: list[int]) -> None:
    assert geometric(*args) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_seqs_buckets": [4, 2]}, "neuron_config.*num_seqs_buckets must rise strictly"),
        ({"num_seqs_buckets": [2, 2, 4]}, "must rise strictly"),
        ({"num_seqs_buckets": []}, "neuron_config.num_seqs_buckets.*at least 1 item"),
        ({"num_seqs_buckets": [0, 4]}, "neuron_config.num_seqs_buckets.0.*greater than 0"),
        ({"num_seqs_buckets": "1,2"}, "neuron_config.num_seqs_buckets.*list"),
        ({"bucket": [1]}, "neuron_config.bucket.*keys: num_batched_tokens_buckets"),
    ],
)
def test_bad_bucket_lists_are_named(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_neuron_config({"neuron_config": config})


def test_bucket_lists_must_reach_the_limits() -> None:
    config = read_neuron_config({"neuron_config": {"num_seqs_buckets": [1, 4]}})
    with pytest.raises(ValueError, match=r"num_seqs_buckets must end at max_num_seqs=8, got \[1, 4\]"):
        config.check_limits(64, 8, 256)
    config.check_limits(64, 4, 256)
