"""Cross-attention over blocks that an encoder's output fills, against dense attention in float64."""

import numpy as np
import pytest
import torch
from bare_step import BareStep, padded
from vllm.v1.attention.backend import AttentionType

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.caches.cross import CrossCaches
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, Tiling

NUM_ROWS, MAX_LENGTH, BLOCK = 8, 96, 4
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
DECODE, CHUNK = Tiling(1, 8), Tiling(16, 32)
DEAF = 3
"""The row of a request without an encoder input."""


def batch_of(decodes: list[int], chunks: list[int]) -> InputBatch:
    """A batch of rows of one token at ``positions``, then chunks from position 0 on, in rows that count up."""
    query_len = np.array([1] * len(decodes) + chunks, np.int64)
    num_computed = np.array(decodes + [0] * len(chunks), np.int64)
    count = len(query_len)
    return InputBatch(
        req_ids=[str(index) for index in range(count)],
        num_tokens=int(query_len.sum()),
        rows=np.arange(count),
        query_len=query_len,
        query_start=np.cumsum(query_len) - query_len,
        num_computed=num_computed,
        seq_lens=num_computed + query_len,
        is_sampled=np.ones(count, bool),
        num_sampled=count,
        num_decodes=len(decodes),
    )


@pytest.mark.parametrize("length", [1, 30, 32, 75])
@pytest.mark.parametrize("padding", [0, 3])
def test_every_token_sees_all_of_its_output(length: int, padding: int) -> None:
    """A token sees its encoder output in decode, with chunks or without, and in chunks alone. Steps of a kind share
    a buffer."""
    limits = StepLimits(
        400, NUM_ROWS, MAX_LENGTH, DECODE, CHUNK, (*COMMON_DIMS, *plan_dims(DECODE, CHUNK, length)), cross_len=length
    )
    own, cross = (BlockTable(NUM_ROWS, size, BLOCK, CHUNK.keys // BLOCK) for size in (MAX_LENGTH, length))
    rng = np.random.default_rng(length)
    num_blocks = -(-length // BLOCK)
    blocks = 1 + rng.permutation(NUM_ROWS * num_blocks).reshape(NUM_ROWS, -1)
    cache = torch.full((1 + blocks.size, BLOCK, 2 * KV_HEADS, HEAD_SIZE), float("nan"))
    cache[0] = 0.0
    outputs = rng.normal(size=(NUM_ROWS, length, 2 * KV_HEADS, HEAD_SIZE)).astype(np.float32)
    for row in range(NUM_ROWS):
        own.assign(row, list(range(1 + row * 24, 25 + row * 24)))
        cross.assign(row, blocks[row].tolist())
        for position in range(length):
            cache[blocks[row, position // BLOCK], position % BLOCK] = torch.from_numpy(outputs[row, position])
    cross.assign(DEAF, [])  # Blocks that it had before are left in the table.

    tiles = DECODE.keys, CHUNK.keys
    groups = [AttentionGroup(["self"], own, *tiles), AttentionGroup(["cross"], cross, *tiles, cross_len=length)]
    bare = BareStep([PagedCaches(groups[:1], limits), CrossCaches(groups[1:], limits)], limits, NUM_ROWS, MAX_LENGTH)
    bare.requests.num_known[:] = MAX_LENGTH
    impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, attn_type=AttentionType.ENCODER_DECODER)
    batches = [
        batch_of([5, 40, 95, 7], []),
        batch_of([2], []),
        batch_of([9, 60], [1, 3, 40, 16]),
        batch_of([], [33, 2]),
    ]
    for kind in (StepKind.DECODE, StepKind.MIXED):
        alike = [batch for batch in batches if batch.is_decode == (kind == StepKind.DECODE)]
        size = padded(limits, [need for batch in alike for need in bare.layout.needs(batch)], padding)
        for batch in alike:
            call = bare.run(batch, bare.send(batch, size))
            query = rng.normal(size=(size.num_tokens, HEADS, HEAD_SIZE)).astype(np.float32)
            flat = torch.from_numpy(query).flatten(1)
            told = call.metadata["cross"]
            out = impl.forward(None, flat, None, None, cache, told)  # type: ignore[arg-type]
            assert torch.isfinite(out).all()
            pairs = limits.cross_pairs(size)
            for name, plan in (("decode_pairs", told.decode), ("chunk_pairs", told.chunks)):
                assert pairs[name] == (0 if plan is None else len(plan.pair_tile)), "what memory is counted by"
            trace = bare.trace(call, batch)["cross"]
            assert not trace.slots.any(), "a step writes outside the null block"
            for row, start, count in zip(batch.rows, batch.query_start, batch.query_len, strict=True):
                for token in range(start, start + count):
                    got = out[token].view(HEADS, HEAD_SIZE).numpy()
                    seen = trace.seen[token]
                    if row == DEAF:
                        assert not len(seen.positions) and not got.any()
                        continue
                    np.testing.assert_array_equal(seen.positions, np.arange(length))
                    slots = blocks[row].repeat(BLOCK)[:length] * BLOCK + np.arange(length) % BLOCK
                    np.testing.assert_array_equal(seen.slots, slots)
                    np.testing.assert_allclose(got, dense(query[token], outputs[row]), atol=2e-5)


def dense(query: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Attention of one token [H, D] over ``output`` [N, 2 * K, D]."""
    keys, values = (np.repeat(half, HEADS // KV_HEADS, axis=1) for half in np.split(output.astype(np.float64), 2, 1))
    weights = np.exp(np.einsum("hd,nhd->hn", query.astype(np.float64), keys) / np.sqrt(HEAD_SIZE))
    return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), values)
