"""The batch of a step and its packed arrays, against lists of every request's tokens."""

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from model_runner_base.batch_builder import BatchBuilder
from model_runner_base.graph_policy import GraphSize
from model_runner_base.input_batch import PackedStep, in_order, token_sections
from model_runner_base.request_states import RequestInfo, RequestStates

MAX_NUM_REQS = 6
MAX_LENGTH = 40


def step(scheduled: dict[str, int]) -> Any:
    """What ``BatchBuilder`` reads of a scheduler's output."""
    return SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_packed_arrays_say_what_every_token_is(data: st.DataObject) -> None:
    requests = RequestStates(MAX_NUM_REQS, MAX_LENGTH)
    threshold = data.draw(st.sampled_from([None, 1, 3]))
    builder = BatchBuilder(requests, threshold)
    known: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    for number in data.draw(st.permutations(range(MAX_NUM_REQS)))[: data.draw(st.integers(1, MAX_NUM_REQS))]:
        req_id = f"request {number}"
        known[req_id] = data.draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=20))
        computed[req_id] = data.draw(st.integers(0, len(known[req_id]) - 1))
        info = RequestInfo(SamplingParams(), 0, known[req_id])
        requests.add(req_id, info, known[req_id], computed[req_id])

    for _ in range(data.draw(st.integers(1, 5))):
        # What is left of the known tokens, in chunks; then a token a step, which the device has sampled.
        scheduled = {
            req_id: data.draw(st.integers(1, max(1, len(tokens) - computed[req_id])))
            for req_id, tokens in known.items()
            if data.draw(st.booleans())
        }
        if not scheduled:
            continue
        batch = builder.build(step(scheduled))
        assert sorted(batch.req_ids) == sorted(scheduled)
        if threshold is not None:
            regions = [
                ("fresh" if not computed[req_id] else "decode" if scheduled[req_id] <= threshold else "extend")
                for req_id in batch.req_ids
            ]
            assert regions == sorted(regions, key=["decode", "extend", "fresh"].index)
        num_tokens, num_reqs = sum(scheduled.values()), len(scheduled)
        padding = data.draw(st.integers(0, 3))
        size = GraphSize(16, num_tokens + padding, num_reqs + padding, 0, 0)
        packed = PackedStep(size, in_order(token_sections(size)))
        packed.buffer[:] = 77  # Of another step.
        builder.pack(batch, packed.views)
        views = {name: view.tolist() for name, view in packed.views.items()}
        token = 0
        for index, req_id in enumerate(batch.req_ids):
            tokens, row, start = known[req_id], requests.rows[req_id], computed[req_id]
            assert batch.query_start[index] == token
            for position in range(start, start + scheduled[req_id]):
                assert views["positions"][token] == position
                if position < len(tokens):
                    assert views["token_ids"][token] == tokens[position]
                assert views["token_sources"][token] == (row if position >= len(tokens) else -1)
                token += 1
            computed[req_id] += scheduled[req_id]
            is_sampled = computed[req_id] >= len(tokens)
            assert views["logits_indices"][index] == token - 1
            assert views["sample_rows"][index] == (row if is_sampled else MAX_NUM_REQS)
            assert views["sample_positions"][index] == batch.seq_lens[index] == computed[req_id]
            assert batch.num_computed[index] == start and batch.is_sampled[index] == is_sampled
            assert (index in batch.unsampled) != is_sampled
        assert batch.num_sampled == len(batch.req_ids) - len(batch.unsampled)
        assert requests.num_computed[batch.rows].tolist() == [computed[req_id] for req_id in batch.req_ids]
        assert views["token_ids"][token:] == views["positions"][token:] == [0] * padding
        assert views["token_sources"][token:] == [-1] * padding
        assert views["logits_indices"][num_reqs:] == views["sample_positions"][num_reqs:] == [0] * padding
        assert views["sample_rows"][num_reqs:] == [MAX_NUM_REQS] * padding


def test_numbers_out_of_range_are_refused() -> None:
    """As NumPy does: an id that an int32 cannot hold is an error and not another id."""
    requests = RequestStates(1, 4)
    for token_ids in ([1, 1 << 31], [1, 2, 3, 4, 5]):
        with pytest.raises(struct.error):
            requests.add("a", RequestInfo(SamplingParams(), 0, token_ids), token_ids, 0)


def test_who_holds_a_row_takes_nobody_elses() -> None:
    """A session that goes on arrives like a new request, and a running request may have to wait meanwhile."""
    requests = RequestStates(2, MAX_LENGTH)
    for req_id in ("waits", "goes on"):
        requests.add(req_id, RequestInfo(SamplingParams(), 0, [1]), [1], 0)
    requests.make_room(["goes on"], {"goes on": 3})
    assert requests.rows.keys() == {"waits", "goes on"}
    requests.make_room(["new", "goes on"], {"new": 1, "goes on": 3})
    assert requests.rows.keys() == {"goes on"}
