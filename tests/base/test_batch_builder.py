"""The batch of a step, its packed form and what the device makes of that, against lists of requests' tokens."""

import struct
from typing import Any

import pytest
import torch
from bare_step import BareStep, padded, scheduled
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.batch import BatchBuilder, BatchOrder
from model_runner_base.step.request_states import BlockTable, RequestInfo, RequestStates, commit, known_or
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, Tiling

MAX_NUM_REQS = 6
MAX_LENGTH = 40
TOKENS = st.integers(0, (1 << 31) - 1)


def make_caches(has_plans: bool, length: int = MAX_LENGTH) -> tuple[list[CacheKind], StepLimits]:
    """Caches of no layer, with attention plans or for metadata builders: each has another layout of tokens."""
    decode, chunk = Tiling(1, 8), Tiling(4, 8)
    dims = (*COMMON_DIMS, *(plan_dims(decode, chunk) if has_plans else ()))
    limits = StepLimits(MAX_NUM_REQS * length, MAX_NUM_REQS + 3, length, decode, chunk, dims)
    if has_plans:
        table = BlockTable(MAX_NUM_REQS, length, 4, 2)
        return [PagedCaches([AttentionGroup(["layer"], table, 8, 8)], limits)], limits
    config: Any = None
    return [BuilderCaches([], limits, config, DeviceOps(torch.device("cpu")))], limits


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_packed_arrays_say_what_every_token_is(data: st.DataObject) -> None:
    orders = [None, BatchOrder(1), BatchOrder(1, fresh_last=True), BatchOrder(3, True)]
    orders.append(BatchOrder(3, fresh_last=True, prompts_in_chunks=True))
    order = data.draw(st.sampled_from(orders))
    has_plans = order == BatchOrder(1)
    caches, limits = make_caches(has_plans)
    bare = BareStep(caches, limits, MAX_NUM_REQS, MAX_LENGTH)
    requests = bare.requests
    builder = BatchBuilder(requests, order or BatchOrder(MAX_LENGTH))
    known: dict[str, list[int]] = {}
    every: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    for number in data.draw(st.permutations(range(MAX_NUM_REQS)))[: data.draw(st.integers(1, MAX_NUM_REQS))]:
        req_id = f"request {number}"
        known[req_id] = data.draw(st.lists(TOKENS, min_size=1, max_size=20))
        every[req_id] = known[req_id].copy()
        computed[req_id] = data.draw(st.integers(0, len(known[req_id]) - 1))
        info = RequestInfo(SamplingParams(), 0, known[req_id])
        requests.admit(req_id, info, known[req_id], computed[req_id])

    for _ in range(data.draw(st.integers(1, 5))):
        # The rest of the known tokens comes in chunks; then a token a step, which the device has sampled.
        wanted = {
            req_id: data.draw(st.integers(1, max(1, len(tokens) - computed[req_id])))
            for req_id, tokens in known.items()
            if data.draw(st.booleans())
        }
        if not wanted:
            continue
        batch = builder.build(scheduled(wanted))
        req_ids = list(wanted)
        if order is not None:
            # Decode rows; others that go on, with few tokens and with more; fresh ones. Among those alike the
            # scheduler's order.
            is_short = {req_id: wanted[req_id] <= order.decode_len for req_id in req_ids}
            is_output = {req_id: computed[req_id] >= len(known[req_id]) for req_id in req_ids}
            is_decode = is_output if order.prompts_in_chunks else is_short
            is_fresh = {req_id: order.fresh_last and not computed[req_id] for req_id in req_ids}
            regions = {
                req_id: 3 if is_fresh[req_id] else 0 if is_decode[req_id] else 1 if is_short[req_id] else 2
                for req_id in req_ids
            }
            req_ids.sort(key=regions.__getitem__)
            num_decodes = sum(is_decode.values())
            assert batch.num_decodes == num_decodes and batch.is_decode == (num_decodes == len(wanted))
        assert batch.req_ids == req_ids
        num_tokens, num_reqs = sum(wanted.values()), len(wanted)
        assert batch.num_tokens == num_tokens and batch.query_len.tolist() == [wanted[req_id] for req_id in req_ids]
        padding = data.draw(st.integers(0, 3))
        size = padded(limits, bare.layout.needs(batch), padding)
        for section in bare.tokens.sections(size):
            bare.packer.at(size).views[section.name][:] = 77  # Numbers of another step.
        step = bare.send(batch, size)
        views = {name: view.tolist() for name, view in step.views.items()}
        call = bare.run(batch, step)
        fed, positions = call.token_ids.tolist(), call.positions.tolist()
        (sample_rows, sample_positions), sampled = call.sample_slots.tolist(), {}
        token, is_padding = 0, [True] * size.num_tokens
        for index, req_id in enumerate(req_ids):
            tokens, row, start = known[req_id], requests.rows[req_id], computed[req_id]
            if has_plans and size.kind == StepKind.MIXED and index == batch.num_decodes:
                token = limits.named(size)["decode_rows"]  # Padding of decode rows lies before the chunks.
            assert batch.query_start[index] == token and batch.rows[index] == row
            for position in range(start, start + wanted[req_id]):
                packed = views["token_ids"][token]
                assert packed == (tokens[position] if position < len(tokens) else -(row + 1))
                assert fed[token] == every[req_id][position]
                assert positions[token] == position
                is_padding[token] = False
                token += 1
            computed[req_id] += wanted[req_id]
            is_sampled = computed[req_id] >= len(tokens)
            assert views["logits_indices"][index] == token - 1
            assert views["sample_rows"][index] == sample_rows[index] == (row if is_sampled else MAX_NUM_REQS)
            assert sample_positions[index] == batch.seq_lens[index] == computed[req_id]
            assert batch.num_computed[index] == start and batch.is_sampled[index] == is_sampled
            assert (index in batch.unsampled) != is_sampled
            if is_sampled:
                sampled[index] = data.draw(TOKENS)
                every[req_id][computed[req_id] :] = [sampled[index]]
        assert batch.num_sampled == len(batch.req_ids) - len(batch.unsampled)
        assert requests.num_computed[batch.rows].tolist() == [computed[req_id] for req_id in batch.req_ids]
        assert not any(value for value, is_spare in zip(views["token_ids"], is_padding, strict=True) if is_spare)
        for token, is_spare in enumerate(is_padding):
            # Padding of chunks has the position of one of their tokens: any position that the model has will do.
            assert not is_spare or (fed[token] == 0 and 0 <= positions[token] < MAX_LENGTH)
        assert sum(is_padding) == size.num_tokens - num_tokens
        assert views["logits_indices"][num_reqs:] == [0] * (size.num_logits - num_reqs)
        assert views["sample_rows"][num_reqs:] == [MAX_NUM_REQS] * (size.num_logits - num_reqs)
        bare.commit(call, [sampled.get(index, 99) for index in range(size.num_logits)])
        # The device knows of each row the token that was sampled last, and its position.
        tokens_there, computed_there = (tensor.tolist() for tensor in bare.rows.tensors)
        for index in sampled:
            row = int(batch.rows[index])
            assert tokens_there[row] == [sampled[index]] and computed_there[row] == computed[req_ids[index]]


@given(st.data())
@settings(deadline=None)
def test_device_rows_record_and_answer(data: st.DataObject) -> None:
    """Rows on the device answer as a dictionary does; records for the padding row reach no request."""
    tensors = [torch.zeros((7, 1), dtype=torch.int32), torch.zeros(7, dtype=torch.int32)]
    model = {row: (0, 0) for row in range(6)}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.sampled_from(range(6)), unique=True, max_size=6))
        padding = data.draw(st.integers(0, 3))
        records = [(data.draw(TOKENS), data.draw(st.integers(0, MAX_LENGTH))) for _ in range(len(rows) + padding)]
        slots = torch.tensor([rows + [6] * padding, [position for _, position in records]], dtype=torch.int32)
        commit(tensors, slots, torch.tensor([token for token, _ in records], dtype=torch.int32))
        model.update(zip(rows, records, strict=False))
    assert dict(enumerate(zip(tensors[0][:6, 0].tolist(), tensors[1][:6].tolist(), strict=True))) == model
    values = data.draw(st.lists(st.integers(-6, 100), max_size=8))
    answers = known_or(torch.tensor(values, dtype=torch.int32), tensors[1])
    assert answers.tolist() == [model[-value - 1][1] if value < 0 else value for value in values]


def test_numbers_out_of_range_are_refused() -> None:
    """A number out of range raises, as in NumPy: an id that an int32 cannot hold must not become another id."""
    requests = RequestStates(1, 4)
    for token_ids in ([1, 1 << 31], [1, 2, 3, 4, 5]):
        with pytest.raises(struct.error):
            requests.admit("a", RequestInfo(SamplingParams(), 0, token_ids), token_ids, 0)


def test_who_holds_a_row_takes_nobody_elses() -> None:
    """A session that goes on arrives like a new request, and a running request may have to wait meanwhile."""
    requests = RequestStates(2, MAX_LENGTH)
    for req_id in ("waits", "goes on"):
        requests.admit(req_id, RequestInfo(SamplingParams(), 0, [1]), [1], 0)
    requests.free_rows_for(["goes on"], {"goes on": 3})
    assert requests.rows.keys() == {"waits", "goes on"}
    requests.free_rows_for(["new", "goes on"], {"new": 1, "goes on": 3})
    assert requests.rows.keys() == {"goes on"}


def test_a_request_that_misses_a_step_keeps_its_row() -> None:
    """A new request takes the row of the one that was in no step for longest. The other keeps its row, since nothing is
    sent anew when it comes back."""
    requests = RequestStates(2, MAX_LENGTH)
    for req_id in ("runs", "waits"):
        requests.admit(req_id, RequestInfo(SamplingParams(), 0, [1]), [1], 0)
    builder = BatchBuilder(requests, BatchOrder())
    for names in (["runs", "waits"], ["runs"]):
        builder.build(Schedule(set(), (), [], names, [None], dict.fromkeys(names, 1), len(names)))
    requests.free_rows_for(["new"], {"new": 1})
    assert requests.rows.keys() == {"runs"}
