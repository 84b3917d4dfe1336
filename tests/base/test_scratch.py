"""Layers that see each request whole, over a scratch cache, against dense attention to both sides in float64."""

import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch_step import HEAD_SIZE, Step, batch_of, size_of
from vllm.v1.attention.backend import AttentionType

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.sizes import StepKind, Tiling

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
