"""A step of layers that see each request whole, over a scratch cache, and dense attention to both sides in float64."""

from math import lcm
from typing import Any

import numpy as np
import torch
from bare_step import BareStep, padded
from vllm.v1.attention.backend import AttentionType

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import CAUSAL, KeyRange
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.scratch import ScratchCaches, ScratchTable, num_scratch_blocks
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, StepSize, Tiling

MAX_LENGTH = 200
NUM_ROWS = 8
HEAD_SIZE = 8
DECODE, CHUNK = Tiling(1, 16), Tiling(16, 32)


def batch_of(lengths: list[int], first_row: int = 0) -> InputBatch:
    """A batch of whole requests, those of one token first, in rows that count down."""
    query_len = np.array(sorted(lengths, key=lambda length: length > 1), np.int64)
    count = len(query_len)
    return InputBatch(
        req_ids=[f"request {index}" for index in range(count)],
        num_tokens=int(query_len.sum()),
        rows=(first_row - np.arange(count)) % NUM_ROWS,
        query_len=query_len,
        query_start=np.cumsum(query_len) - query_len,
        num_computed=np.zeros(count, np.int64),
        seq_lens=query_len.copy(),
        is_sampled=np.ones(count, bool),
        num_sampled=count,
        num_decodes=int((query_len == 1).sum()),
    )


def seen_by(key_range: KeyRange, position: int, length: int) -> np.ndarray:
    """Keys that a token sees, by the definition."""
    key = np.arange(length)
    visible = np.ones(length, bool) if key_range.is_whole else key <= position
    if key_range.window:
        visible &= np.abs(position - key) < key_range.window
    return key[visible]


def dense_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    key_range: KeyRange,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of one request in float64: query [T, H, D], key and value [T, K, D], sinks [H]."""
    length, num_heads, head_size = query.shape
    keys, values = (np.repeat(x.astype(np.float64), num_heads // key.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query.astype(np.float64), keys) / np.sqrt(head_size)
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores)
    for position in range(length):
        weights[:, position, np.setdiff1d(np.arange(length), seen_by(key_range, position, length))] = 0.0
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64))[:, None, None]
    return np.einsum("hqk,khd->qhd", weights / total, values)


class Step:
    """Layers that see requests whole, at any and at a short distance, and a causal layer, in one step after another."""

    def __init__(
        self,
        decode: Tiling = DECODE,
        chunk: Tiling = CHUNK,
        block_size: int = 4,
        max_num_tokens: int = 400,
        max_num_reqs: int = NUM_ROWS,
        window: int = 5,
        heads: tuple[int, int] = (4, 2),
        **options: Any,
    ) -> None:
        self.limits = StepLimits(400, NUM_ROWS, MAX_LENGTH, decode, chunk, (*COMMON_DIMS, *plan_dims(decode, chunk)))
        per_tile = lcm(decode.keys, chunk.keys) // block_size
        self.scratch = ScratchTable(NUM_ROWS, MAX_LENGTH, block_size, per_tile)
        self.paged = BlockTable(NUM_ROWS, MAX_LENGTH, block_size, per_tile)
        blocks = np.random.default_rng(0).permutation(NUM_ROWS * (MAX_LENGTH // block_size)) + 1
        for row, ids in enumerate(blocks.reshape(NUM_ROWS, -1)):
            self.paged.assign(row, ids.tolist())
        self.key_ranges = {
            "whole": KeyRange(is_whole=True),
            "window": KeyRange(window, is_whole=True),
            "causal": CAUSAL,
        }
        self.groups = [
            AttentionGroup(
                [name], self.scratch if key_range.is_whole else self.paged, decode.keys, chunk.keys, key_range
            )
            for name, key_range in self.key_ranges.items()
        ]
        whole = [group for group in self.groups if group.key_range.is_whole]
        causal = [group for group in self.groups if not group.key_range.is_whole]
        kinds = [ScratchCaches(whole, self.limits), PagedCaches(causal, self.limits)]
        self.bare = BareStep(kinds, self.limits, NUM_ROWS, MAX_LENGTH)
        self.bare.requests.num_known[:] = MAX_LENGTH
        self.num_heads, self.num_kv_heads = heads
        # Entries that were not written may be anything, even NaN; but for the null block.
        num_blocks = {"scratch": num_scratch_blocks(block_size, max_num_tokens, max_num_reqs), "paged": len(blocks) + 1}
        shapes = {name: (count, block_size, 2 * heads[1], HEAD_SIZE) for name, count in num_blocks.items()}
        caches = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
        for cache in caches.values():
            cache[0] = 0.0
        self.caches = {"whole": caches["scratch"], "window": caches["scratch"], "causal": caches["paged"]}
        self.impls = {
            name: PagedAttentionImpl(
                *(self.num_heads, HEAD_SIZE, HEAD_SIZE**-0.5, self.num_kv_heads),
                sliding_window=key_range.window or None,
                attn_type=AttentionType.ENCODER_ONLY if key_range.is_whole else AttentionType.DECODER,
                **options,
            )
            for name, key_range in self.key_ranges.items()
        }
        self.rng = np.random.default_rng(1)

    def run(self, batch: InputBatch, size: StepSize) -> ModelCall:
        """Packs the step, attends layer by layer, and compares every token with the reference."""
        step = self.bare.send(batch, size)
        call = self.bare.run(batch, step)
        self.check_trace(call, batch)
        for name in self.key_ranges:
            self.check_layer(name, call, batch)
        return call

    def check_trace(self, call: ModelCall, batch: InputBatch) -> None:
        """Checks that each layer is told each key of its range once, in the slots of the request's own tokens."""
        layers = self.bare.trace(call, batch)
        is_padding = np.ones(call.size.num_tokens, bool)
        for name, (slots, seen) in layers.items():
            taken: set[int] = set()
            for start, length in zip(batch.query_start, batch.query_len, strict=True):
                tokens = slice(start, start + length)
                is_padding[tokens] = False
                assert call.positions[tokens].tolist() == list(range(length))
                blocks = {slot // self.scratch.block_size for slot in slots[tokens].tolist()}
                assert 0 not in blocks and not blocks & taken, "blocks that are no request's own"
                taken |= blocks
                for position in range(length):
                    keys = seen_by(self.key_ranges[name], position, length)
                    np.testing.assert_array_equal(seen[start + position].positions, keys)
                    np.testing.assert_array_equal(seen[start + position].slots, slots[tokens][keys])
            if self.key_ranges[name].is_whole:
                assert taken == set(range(1, 1 + len(taken))), "blocks are handed out side by side"
            assert not (slots[is_padding] // self.scratch.block_size).any(), "padding is written outside the null block"

    def check_layer(self, name: str, call: ModelCall, batch: InputBatch) -> None:
        """Checks a layer with queries, keys and values of its own, so that it finds another's in the scratch cache."""
        num_tokens = call.size.num_tokens
        query, key, value = (
            self.rng.normal(size=(num_tokens, heads, HEAD_SIZE)).astype(np.float32)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        impl = self.impls[name]
        flat, flat_key, flat_value = (torch.from_numpy(x.reshape(num_tokens, -1)) for x in (query, key, value))
        layer = self.caches[name], call.metadata[name]
        out = impl.forward(None, flat, flat_key, flat_value, *layer)  # type: ignore[arg-type]
        assert torch.isfinite(out).all()
        sinks = None if impl.sinks is None else impl.sinks.numpy()
        for start, length in zip(batch.query_start, batch.query_len, strict=True):
            tokens = slice(start, start + length)
            one = query[tokens], key[tokens], value[tokens]
            want = dense_attention(*one, self.key_ranges[name], impl.logits_soft_cap, sinks)
            np.testing.assert_allclose(out[tokens].reshape(want.shape), want, atol=2e-5)


def size_of(step: Step, *batches: InputBatch, padding: int = 0) -> StepSize:
    """A size that all the batches fit in, with ``padding`` more of each dim."""
    needs = [need for batch in batches for need in step.bare.layout.needs(batch)]
    return padded(step.limits, needs, padding)
