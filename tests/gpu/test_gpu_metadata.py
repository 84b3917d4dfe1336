"""Metadata of a step for backends with kernels: computed on the device, compared with loops over requests."""

from typing import Any

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_steps import (
    LIMITS,
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    MAX_NUM_TOKENS,
    Bench,
    PlanningBackend,
    Request,
    ViewsBackend,
    fill,
    steps,
)

from model_runner_base.caches.builders import decode_dims
from model_runner_base.caches.group import bind_rows
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import DecodeRows, ModelCall
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, StepSize, Tiling


@pytest.mark.parametrize("backend", [ViewsBackend, PlanningBackend])
@settings(deadline=None, max_examples=examples(150))
@given(st.lists(steps(), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_kernels_are_told_of_every_token(
    backend: type[ViewsBackend], every: list[tuple[list[Request], StepSize]], seed: int
) -> None:
    """Kernels are told of every token by number, always at the addresses where a captured graph reads again."""
    bench, random = Bench(backend), np.random.default_rng(seed)
    addresses: set[tuple[int, ...]] = set()
    for requests, size in every:
        for table in bench.tables.values():
            for request in requests:
                count = -(-(request.start + request.count + (request.ahead or 0)) // table.block_size)
                table.assign(request.row, random.integers(1, 1000, count).tolist())
        batch, step = fill(bench, requests, size)
        call = bench.run(batch, step)
        check(bench, call, requests, size)
        common = call.metadata["local"], call.metadata["global"]
        tensors = [common[0].query_start_loc, common[0].seq_lens]
        tensors += [tensor for each in common for tensor in (each.block_table_tensor, each.slot_mapping)]
        addresses.add(tuple(tensor.data_ptr() for tensor in (*tensors, *call.slot_mapping.values())))
    assert len(addresses) == 1


def lengths_on_host(common: Any) -> torch.Tensor:
    """Lengths on the host, of a vLLM that has one field for them, or two, which have to agree."""
    if hasattr(common, "seq_lens_cpu_upper_bound"):
        return common.seq_lens_cpu_upper_bound
    assert common._num_computed_tokens_cpu.equal(common._seq_lens_cpu - common.query_start_loc_cpu.diff())
    return common._seq_lens_cpu


def check(bench: Bench, call: ModelCall, requests: list[Request], size: StepSize) -> None:
    num_tokens, num_padding = sum(request.count for request in requests), size.num_reqs - len(requests)
    places = [(request, request.start + index) for request in requests for index in range(request.count)]
    padding_tokens = size.num_tokens - num_tokens
    assert call.positions.dtype == torch.int32
    assert call.positions.tolist() == [position for _, position in places] + [0] * padding_tokens
    ends = np.cumsum([request.count for request in requests]).tolist()
    for name, table in bench.tables.items():
        common, block_size = call.metadata[name], table.block_size
        slots = [
            int(table.table[request.row, position // block_size]) * block_size + position % block_size
            for request, position in places
        ]
        assert call.slot_mapping[name].dtype == torch.int64
        assert call.slot_mapping[name].tolist() == slots + [-1] * padding_tokens
        is_decode = size.kind == StepKind.DECODE
        assert common.num_actual_tokens == len(common.slot_mapping) == (size.num_tokens if is_decode else num_tokens)
        assert common.slot_mapping.tolist() == call.slot_mapping[name][: common.num_actual_tokens].tolist()
        assert common.query_start_loc.dtype == common.seq_lens.dtype == torch.int32
        assert common.query_start_loc.tolist() == [0, *ends, *[num_tokens] * num_padding]
        assert common.query_start_loc.equal(common.query_start_loc_cpu)
        assert common.seq_lens.tolist() == [request.start + request.count for request in requests] + [0] * num_padding
        bounds = [request.start + request.count + (request.ahead or 0) for request in requests]
        assert lengths_on_host(common).tolist() == bounds + [0] * num_padding
        assert common.max_seq_len == max(bounds)
        assert common.max_query_len == max(request.count for request in requests)
        for row, request in zip(common.block_table_tensor, requests, strict=False):
            count = table.num_blocks[request.row]
            assert row[:count].tolist() == table.table[request.row, :count].tolist()
        assert not common.block_table_tensor[len(requests) :].any(), "padding requests read null blocks"


@pytest.mark.parametrize("backend", [ViewsBackend, PlanningBackend])
@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.MIXED])
def test_a_repeated_step_goes_by_what_the_device_knows(backend: type[ViewsBackend], kind: StepKind) -> None:
    """A repeated step sends nothing: the device has moved its rows on, and new blocks are in the tables."""
    bench = Bench(backend)
    size = LIMITS.size(kind, tokens=4, requests=4, logits=4)
    requests = [Request(row=5, start=14, count=1, ahead=None), Request(row=2, start=3, count=1, ahead=None)]
    for table in bench.tables.values():
        for request in requests:
            table.assign(
                request.row, [10 * request.row + block for block in range(request.start // table.block_size + 1)]
            )
    batch, step = fill(bench, requests, size)
    check(bench, bench.run(batch, step), requests, size)
    parts = bench.components.repeat(batch, step)
    assert parts is not None
    for part in parts:
        part.begin(batch.num_computed)
    _, computed = bench.rows.tensors
    for number in range(1, 6):
        for request in requests:
            request.start += 1
            computed[request.row] = request.start
            for table in bench.tables.values():
                if request.start % table.block_size == 0:
                    table.append([request.row], [[100 + number]])
        batch.num_computed += 1
        batch.seq_lens += 1
        assert all(part.advance(batch.num_computed) for part in parts)
        if number == 1:
            step.send()
        else:
            sent = step.buffer.copy()
            step.entries.clear()
            step.send_entries()
            assert (step.buffer == sent).all()
        check(bench, bench.run(batch, step), requests, size)


@given(
    st.integers(1, 5000), st.integers(1, 800), st.integers(1, 1024), st.sampled_from([ViewsBackend, PlanningBackend])
)
@settings(deadline=None)
def test_padding_is_requests_that_the_model_allows(
    num_tokens: int, num_reqs: int, max_model_len: int, backend: type[ViewsBackend]
) -> None:
    """Kernels read a request's row of the block table as far as its length says."""
    num_reqs = min(num_reqs, num_tokens)
    limits = StepLimits(5000, 800, max_model_len, Tiling(1, 64), Tiling(64, 64))
    bench = Bench(backend, limits)
    size = limits.size(StepKind.MIXED, tokens=num_tokens, requests=num_reqs, logits=num_reqs)
    step = bench.packer.at(size)
    bench.components.fill_padding(size, step.views)
    step.send()
    call = bench.run(None, step)
    common = call.metadata["local"]
    lengths = np.diff(common.query_start_loc.numpy())
    assert (lengths == common.seq_lens.numpy()).all() and lengths.max() <= max_model_len
    assert (lengths == lengths_on_host(common).numpy()).all()
    assert lengths.max() - lengths.min() <= 1
    assert lengths.sum() == min(num_tokens, num_reqs * max_model_len)
    assert (call.slot_mapping["local"] == -1).all() and not common.block_table_tensor.any()
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert call.positions.tolist() == positions.tolist() + [0] * (num_tokens - len(positions))


QUERY = 4
DRAFT_LIMITS = StepLimits(
    MAX_NUM_TOKENS,
    MAX_NUM_REQS,
    MAX_MODEL_LEN,
    Tiling(QUERY, 64),
    Tiling(64, 64),
    dims=(*COMMON_DIMS, *decode_dims(Tiling(QUERY, 64))),
    unread=QUERY - 1,
    pass_tokens=QUERY,
    ahead=QUERY - 1,
)


@pytest.mark.parametrize("backend", [ViewsBackend, PlanningBackend])
@settings(deadline=None)
@given(st.data())
def test_kernels_are_told_of_drafts(backend: type[ViewsBackend], data: st.DataObject) -> None:
    """Rows of decode are uniform in the device's metadata; tokens that a row lacks have no slot. Then come a pass
    over two tokens of each row and the chunks, and one over a token of each."""
    bench, draw = Bench(backend, DRAFT_LIMITS), data.draw
    rows = draw(st.lists(st.integers(0, MAX_NUM_REQS - 1), min_size=1, max_size=MAX_NUM_REQS, unique=True))
    num_decodes = draw(st.integers(0, len(rows)))
    starts, bounds, counts = [], [], []
    for index in range(len(rows)):
        count = draw(st.integers(1, QUERY if index < num_decodes else 5))
        starts.append(draw(st.integers(1, MAX_MODEL_LEN - count)))
        ahead = draw(st.integers(0, min(3, MAX_MODEL_LEN - count - starts[-1]))) if index < num_decodes else 0
        bounds.append(starts[-1] + ahead)
        counts.append(count)
        for table in bench.tables.values():
            blocks = -(-(bounds[-1] + count) // table.block_size)
            table.assign(rows[index], [1 + 20 * rows[index] + block for block in range(blocks)])
    batch = draft_batch(rows, num_decodes, np.array(bounds), np.array(counts))
    computed = bench.rows.tensors[1]
    for row, start, bound, index in zip(rows, starts, bounds, range(len(rows)), strict=True):
        computed[row] = start if index < num_decodes else -9
        bench.requests.num_known[row] = bound if index < num_decodes else MAX_MODEL_LEN
    (size,) = bench.layout.needs(batch)
    step = bench.packer.at(size)
    bench.components.fill(batch, size, step.views)
    step.send()
    call = bench.run(batch, step)
    tokens = [QUERY] * num_decodes + counts[num_decodes:]
    places = [[starts[i] + j if j < counts[i] else None for j in range(tokens[i])] for i in range(len(rows))]
    ends = [start + count for start, count in zip(starts, tokens, strict=True)]
    check_places(bench, call, rows, places, ends, num_decodes)
    for number, has_chunks in ((2, True), (1, False)):
        has_chunks = has_chunks and num_decodes < len(rows)
        if not num_decodes and not has_chunks:
            continue
        positions = torch.tensor(starts[:num_decodes], dtype=torch.int32)[:, None] + torch.arange(number)
        positions, is_token = positions.clamp(max=MAX_MODEL_LEN - 1).int(), positions < MAX_MODEL_LEN
        call = call.again()
        bind_rows(bench.layout, [bench.caches], call, DecodeRows(positions, is_token), has_chunks)
        of_rows = [
            [p if is_one else None for p, is_one in zip(*each, strict=True)]
            for each in zip(positions.tolist(), is_token.tolist(), strict=True)
        ]
        ends = [each[0] + number for each in positions.tolist()]
        chunks = places[num_decodes:] if has_chunks else []
        ends += [starts[i] + counts[i] for i in range(num_decodes, num_decodes + len(chunks))]
        check_places(bench, call, rows, of_rows + chunks, ends, num_decodes)


def draft_batch(rows: list[int], num_decodes: int, num_computed: np.ndarray, query_len: np.ndarray) -> InputBatch:
    laid = np.where(np.arange(len(rows)) < num_decodes, QUERY, query_len)
    return InputBatch(
        req_ids=list(map(str, rows)),
        num_tokens=int(query_len.sum()),
        rows=np.array(rows),
        query_len=query_len,
        query_start=laid.cumsum() - laid,
        num_computed=num_computed,
        seq_lens=num_computed + query_len,
        is_sampled=np.ones(len(rows), np.bool_),
        num_sampled=len(rows),
        num_decodes=num_decodes,
        decode_query_len=QUERY,
    )


def check_places(
    bench: Bench,
    call: ModelCall,
    rows: list[int],
    places: list[list[int | None]],
    seq_lens: list[int],
    num_decodes: int,
) -> None:
    """Checks positions and slots; ``places`` are the positions of each request's tokens, None for one that is none."""
    ends = np.cumsum([len(each) for each in places]).tolist()
    flat = [(row, position) for row, each in zip(rows, places, strict=False) for position in each]
    found = call.positions.tolist()
    assert [p for p, (_, want) in zip(found, flat, strict=True) if want is not None] == [
        want for _, want in flat if want is not None
    ]
    assert all(0 <= position < MAX_MODEL_LEN for position in found)
    for name, table in bench.tables.items():
        common, block_size = call.metadata[name], table.block_size
        slots = [
            -1
            if position is None
            else int(table.table[row, position // block_size]) * block_size + position % block_size
            for row, position in flat
        ]
        assert call.slot_mapping[name].tolist() == common.slot_mapping.tolist() == slots
        assert common.num_actual_tokens == len(slots)
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, *ends]
        assert common.seq_lens.tolist() == seq_lens
        if hasattr(common, "seq_lens_cpu_upper_bound"):
            assert common.seq_lens_cpu_upper_bound.ge(common.seq_lens).all()
            assert common.seq_lens_cpu_upper_bound.max() <= common.max_seq_len
            assert common.seq_lens_cpu_upper_bound.tolist()[num_decodes:] == seq_lens[num_decodes:]
        assert common.max_query_len >= max(map(len, places), default=0)
        blocks_read = -(-np.array(seq_lens, dtype=int) // block_size)
        assert blocks_read.max(initial=0) <= common.block_table_tensor.shape[1], "kernels read as far as a length says"
        for row, read in zip(rows, common.block_table_tensor, strict=False):
            count = table.num_blocks[row]
            assert read[:count].tolist() == table.table[row, :count].tolist() and not read[count:].any()
