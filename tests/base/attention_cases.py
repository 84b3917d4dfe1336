"""Random steps for the tests of attention, packed as the runner packs them, and dense attention in float64."""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from bare_step import BareStep, padded
from hypothesis import strategies as st

from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.attention.plan import CAUSAL, KeyRange
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.spans import NO_SPANS, SentSpans, SpanEnds
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, StepSize, Tiling
from model_runner_base.step.trace import LayerTrace

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
    in_windows: bool = False
    """Whether spans are those of layers with a window, which hides their keys before it."""

    def span_of(self, row: int, position: int) -> tuple[int, int]:
        """First and last of the positions that a token sees by its span; the last is -1 for a token without one."""
        begin, end = self.spans.get(row, (0, -1))
        if not begin <= position <= end or (self.in_windows and not self.key_range.window):
            return 0, -1
        return (max(begin, first_key(self.key_range, position)) if self.in_windows else begin), end

    def keys_of(self, row: int, position: int) -> np.ndarray:
        """Positions of the keys that a token sees."""
        first, last = first_key(self.key_range, position), position
        begin, end = self.span_of(row, position)
        if begin <= position <= end:
            first, last = min(first, begin), max(last, end)
        return np.arange(first, last + 1)


class CaseSpans(SentSpans):
    def __init__(self, case: Case) -> None:
        self._spans = case.spans
        self.in_windows = case.in_windows

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
        in_windows=draw(st.booleans()),
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
    batch, key_range, table, decode, chunk, is_on_device, spans, _ = case
    dims = (*COMMON_DIMS, *plan_dims(decode, chunk))
    limits = StepLimits(1000, 100, MAX_LENGTH, decode, chunk, dims)
    group = AttentionGroup(["layer"], table, decode.keys, chunk.keys, key_range)
    spans_of_case = CaseSpans(case) if spans else NO_SPANS
    bare = BareStep([PagedCaches([group], limits, spans_of_case)], limits, len(table.table), MAX_LENGTH)
    longer = batch.query_len + np.where(batch.query_len > 1, padding // 2, 0)
    more = batch_of(longer, batch.num_computed + padding // 2, batch.rows)
    # With a window the longer requests may need fewer pairs.
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
