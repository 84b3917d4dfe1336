"""Layers that see each request whole, over a scratch cache, against dense attention to both sides in float64."""

from math import lcm
from typing import Any

import numpy as np
import pytest
import torch
from bare_step import BareStep, padded
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from model_runner_base.attention.key_range import CAUSAL, KeyRange
from model_runner_base.attention.layout import CacheLayout, GroupLayout, TensorLayout
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.caches.allocation import allocate, bind
from model_runner_base.caches.attention_groups import attention_groups
from model_runner_base.caches.factory import make_caches, make_layout
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches, plan_dims
from model_runner_base.caches.scratch import ScratchCaches, ScratchTable, num_scratch_blocks
from model_runner_base.caches.spans import NO_SPANS
from model_runner_base.caches.step_limits import step_limits
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, StepSize, Tiling
from model_runner_base.vllm_compat.types.kv_cache import collect_specs, layer_caches

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
        """Checks that each layer is told every key of its range once, in the slots where the request's own tokens
        lie."""
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


RAGGED = {
    "one token": [1],
    "single tokens": [1, 1, 1],
    "one chunk": [7],
    "a whole tile": [16],
    "one more than a tile": [17],
    "several KV tiles": [130],
    "ragged": [33, 1, 70, 2, 1, 64, 5],
}


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (18, 9)], ids=str)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_equals_dense_attention_to_both_sides(lengths: list[int], heads: tuple[int, int], padding: int) -> None:
    """Attention equals dense attention to both sides, next to a causal layer with a cache of its own. Nine KV heads
    are too many for one product over all."""
    step, batch = Step(heads=heads), batch_of(lengths, first_row=3)
    call = step.run(batch, size_of(step, batch, padding=padding))
    assert call.size.kind == (StepKind.DECODE if max(lengths) == 1 else StepKind.MIXED)


@given(
    st.lists(st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=4), min_size=1, max_size=2),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([4, 16]),
    st.sampled_from([1, 2, 5, 17, 40, 1000]),
    st.sampled_from([None, 5.0]),
    st.sampled_from([None, -3.0, 200.0]),
    st.integers(0, 20),
)
@settings(max_examples=examples(60), deadline=None)
def test_steps_one_after_another(
    steps: list[list[int]],
    block_size: int,
    decode_blocks: int,
    chunk_blocks: int,
    query_tile: int,
    window: int,
    cap: float | None,
    sink: float | None,
    padding: int,
) -> None:
    """Random lengths, tiles and windows; each step finds in buffer, table and cache what the last one left.

    The scratch cache holds the largest of them and no more.
    """
    batches = [batch_of(lengths, first_row) for first_row, lengths in enumerate(steps)]
    step = Step(
        Tiling(1, block_size * decode_blocks),
        Tiling(query_tile, block_size * chunk_blocks),
        block_size,
        max_num_tokens=max(batch.num_tokens for batch in batches),
        max_num_reqs=max(batch.num_reqs for batch in batches),
        window=window,
        logits_soft_cap=cap,
        sinks=None if sink is None else torch.linspace(sink / 2, sink, 4),
    )
    by_kind = {
        kind: size_of(step, *alike, padding=padding)
        for kind in (True, False)
        if (alike := [batch for batch in batches if batch.is_decode == kind])
    }
    for size in by_kind.values():
        if padding % 2:
            step.bare.fill_padding(size)
    for batch in batches:
        step.run(batch, by_kind[batch.is_decode])


def test_nothing_but_padding_leaves_the_cache_alone() -> None:
    """A step of padding alone, as every size runs before the first request, writes nothing; its output is finite."""
    step = Step()
    for batch in (batch_of([1]), batch_of([40])):
        size = size_of(step, batch, padding=5)
        step.bare.fill_padding(size)
        packed = step.bare.packer.at(size)
        packed.send()
        call = step.bare.run(batch, packed)
        tokens = size.num_tokens
        for name, cache in step.caches.items():
            query, kv = torch.randn(tokens, 4 * HEAD_SIZE), torch.randn(tokens, 2 * HEAD_SIZE)
            out = step.impls[name].forward(None, query, kv, kv, cache, call.metadata[name])  # type: ignore[arg-type]
            assert torch.isfinite(out).all() and torch.isnan(cache[1:]).all()


def test_pairs_are_those_in_the_key_range() -> None:
    """Pairs of a request of 8 tiles of queries and keys: all meet all; through a window each meets its neighbours."""
    step = Step(Tiling(1, 16), Tiling(16, 16), window=17)
    (need,) = step.bare.layout.needs(batch_of([128]))
    assert step.limits.named(need)["chunk_pairs"] == 8 * 8 + 1
    windowed = make_layout([ScratchCaches(step.groups[1:2], step.limits)], step.limits)
    assert step.limits.named(windowed.needs(batch_of([128]))[0])["chunk_pairs"] == 8 * 3 - 2 + 1


@pytest.mark.parametrize("change", ["continues", "is cut"])
def test_request_in_parts_is_refused(change: str) -> None:
    """A request in parts is refused before anything of the step is packed."""
    step, batch = Step(), batch_of([1, 20, 30])
    if change == "continues":
        batch.num_computed[1], batch.seq_lens[1] = 16, 36
        tokens = "tokens 16 to 35"
    else:
        batch.is_sampled[1], batch.num_sampled = False, 2
        tokens = "tokens 0 to 19"
    with pytest.raises(UnsupportedConfigError, match=f"request 1 comes in parts .{tokens} in this step.*=False"):
        step.bare.layout.needs(batch)


def test_no_step_repeats_another() -> None:
    """A step is not repeated, though its requests of one token have decode rows: each request is done."""
    step, batch = Step(), batch_of([1, 1])
    size = size_of(step, batch)
    assert step.bare.components.repeat(batch, step.bare.send(batch, size)) is None
    assert step.bare.repeat.rows_of(batch.req_ids) is None


def test_other_kinds_of_attention_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="does not support: encoder attention"):
        PagedAttentionImpl(4, 8, 1.0, attn_type=AttentionType.ENCODER)


def test_distances_to_both_sides_are_refused() -> None:
    """Distances such as ALiBi's are refused, since they count from the last key that a query sees."""
    with pytest.raises(NotImplementedError, match="encoder_only attention with ALiBi"):
        PagedAttentionImpl(4, 8, 1.0, attn_type=AttentionType.ENCODER_ONLY, alibi_slopes=[1.0] * 4)


# ---- From vLLM's layers to groups and caches ----


@pytest.fixture
def config(tiny_model: Any) -> VllmConfig:
    """Config of a model that pools whole prompts; layers add themselves."""
    config = EngineArgs(
        str(tiny_model("llama").path),
        dtype="float32",
        block_size=16,
        max_num_seqs=4,
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=MAX_LENGTH,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    ).create_engine_config()
    config.model_config.runner_type = "pooling"  # limits.py lets no engine by so far.
    return config


def make_layers(config: VllmConfig, **windows: int | None) -> dict[str, Any]:
    """Encoder-only layers by name, with their windows; the one that is named "causal" is a decoder's."""
    with set_current_vllm_config(config):
        return {
            name: (Attention if name == "causal" else EncoderOnlyAttention)(
                *(4, HEAD_SIZE, HEAD_SIZE**-0.5),
                num_kv_heads=2,
                cache_config=config.cache_config,
                per_layer_sliding_window=window,
                prefix=name,
            )
            for name, window in windows.items()
        }


def layout_of(config: VllmConfig, num_blocks: int) -> CacheLayout:
    """Cache layout as the scheduler has it: it knows of the layers that keep a cache."""
    kept = layer_caches(collect_specs(config))
    groups = [GroupLayout(kept, config.cache_config.block_size)] if kept else []
    return CacheLayout(num_blocks, groups, [TensorLayout(num_blocks, [name]) for name in kept])


@pytest.mark.parametrize("others", [{}, {"causal": None}], ids=["alone", "beside a cache"])
def test_layers_of_vllm_share_a_scratch_cache(others: dict[str, None], config: VllmConfig) -> None:
    layers = make_layers(config, first=None, local=17, last=None, **others)
    layout, device_ops = layout_of(config, 60), DeviceOps(torch.device("cpu"))
    tables, groups = attention_groups(layout, config, 4, MAX_LENGTH, (64, 128))
    assert len(tables) == len(others), "the scheduler has no blocks for these layers"
    names = [[*others], ["first", "last"], ["local"]]
    assert [group.layer_names for group in groups] == [group for group in names if group]
    assert [group.reads_lines for group in groups] == [True] * len(others) + [False, False]
    limits = step_limits(config, MAX_LENGTH, 64, 64, 128, 0)
    kinds = make_caches(groups, limits, NO_SPANS, config, device_ops)
    assert [type(kind) for kind in kinds] == [ScratchCaches, *([PagedCaches] if others else [])]

    caches, index_of = allocate(layout, config, device_ops, 64)
    assert index_of == dict.fromkeys(others, (0,)) | dict.fromkeys(("first", "local", "last"), (len(others),))
    assert caches[-1].shape == (13 + 4 + 1, 16, 4, HEAD_SIZE) and caches[-1].dtype == torch.float32
    bind(caches, index_of, config)

    bare, batch = BareStep(kinds, limits, 4, MAX_LENGTH), batch_of([1, 33, 90, 70], first_row=3)
    batch.rows %= 4
    bare.requests.num_known[:] = MAX_LENGTH
    for table in tables:
        for row in range(4):
            table.assign(row, list(range(1 + 14 * row, 15 + 14 * row)))
    (size,) = bare.layout.needs(batch)
    call = bare.run(batch, bare.send(batch, size))
    rng, context = np.random.default_rng(0), create_forward_context(call.metadata, config)
    for name, layer in layers.items():
        query, key, value = (
            rng.normal(size=(size.num_tokens, heads, HEAD_SIZE)).astype(np.float32) for heads in (4, 2, 2)
        )
        with override_forward_context(context):
            out = layer(*(torch.from_numpy(x).flatten(1) for x in (query, key, value)))
        key_range = KeyRange(window=17 if name == "local" else 0, is_whole=name != "causal")
        for start, length in zip(batch.query_start, batch.query_len, strict=True):
            tokens = slice(start, start + length)
            want = dense_attention(query[tokens], key[tokens], value[tokens], key_range)
            np.testing.assert_allclose(out[tokens].reshape(want.shape), want, atol=2e-5)


def test_models_without_such_layers_are_paged_as_ever(config: VllmConfig) -> None:
    make_layers(config, causal=None)
    layout, device_ops = layout_of(config, 60), DeviceOps(torch.device("cpu"))
    tables, groups = attention_groups(layout, config, 4, MAX_LENGTH, (64, 128))
    limits = step_limits(config, MAX_LENGTH, 64, 64, 128, 0)
    kinds = make_caches(groups, limits, NO_SPANS, config, device_ops)
    assert [type(kind) for kind in kinds] == [PagedCaches] and len(tables) == len(groups) == 1
    assert len(allocate(layout, config, device_ops, 64)[0]) == 1


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (("model_config", "runner_type", "generate"), "use a model that pools"),
        (("scheduler_config", "enable_chunked_prefill", True), "set enable_chunked_prefill=False"),
        (("cache_config", "enable_prefix_caching", True), "set enable_prefix_caching=False"),
    ],
)
def test_schedules_in_parts_are_refused_at_the_start(
    change: tuple[str, str, Any], advice: str, config: VllmConfig
) -> None:
    make_layers(config, first=None)
    section, field, value = change
    setattr(getattr(config, section), field, value)
    with pytest.raises(UnsupportedConfigError, match=f"layer first sees each request whole, in one step: {advice}"):
        attention_groups(layout_of(config, 1), config, 4, MAX_LENGTH, (64, 128))


def test_backends_with_kernels_of_their_own_are_refused(config: VllmConfig) -> None:
    (layer,) = make_layers(config, first=None).values()
    layer.attn_backend = type("Kernels", (AttentionBackend,), {})
    with pytest.raises(UnsupportedConfigError, match="use the base's own attention backend"):
        attention_groups(layout_of(config, 1), config, 4, MAX_LENGTH, (64, 128))
