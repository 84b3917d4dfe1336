"""Paged attention against dense attention in float64."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attention_cases import Case, batch_of, cases, dense_attention, pack
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import CAUSAL
from model_runner_base.attention.unequal_heads import UnequalHeadsBackend, UnequalHeadsImpl
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.rounds import loops_run_by, unrolled
from model_runner_base.step.sizes import Tiling


@given(
    cases(),
    st.sampled_from([(4, 4), (4, 2), (6, 1), (18, 9)]),
    st.sampled_from([8, 5, 11]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
    st.sampled_from([None, -3.0, 3.0, 200.0]),
    st.integers(0, 40),
    st.sampled_from([0, 1, 2, 5, 16]),
    st.booleans(),
)
@settings(max_examples=examples(120), deadline=None)
def test_paged_attention_equals_dense(
    case: Case,
    heads: tuple[int, int],
    value_size: int,
    cap: float | None,
    has_slopes: bool,
    sink: float | None,
    padding: int,
    piece: int,
    is_traced: bool,
) -> None:
    """Paged attention equals dense attention with padding tokens, tiles and pairs, NaN in unused cache entries, and
    blocks scattered over the cache, at once and in pieces. Values may have another head size than keys."""
    if has_slopes:
        case = case._replace(spans={})  # No model has both.
    batch, key_range, table = case.batch, case.key_range, case.table
    block_size = table.block_size
    num_heads, num_kv_heads = heads
    head_size = 8
    is_equal = value_size == head_size
    row = (2 * num_kv_heads, head_size) if is_equal else (num_kv_heads, head_size + value_size)
    size, metadata, _, tokens = pack(case, padding)
    num_tokens = size.num_tokens
    for plan in filter(None, (metadata.decode, metadata.chunks)):
        plan.piece = piece

    def split(rows: np.ndarray) -> list[np.ndarray]:
        """Keys and values of tokens."""
        return np.split(rows, [num_kv_heads], 1) if is_equal else np.split(rows, [head_size], 2)

    rng = np.random.default_rng(0)
    num_blocks = int(table.table.max()) + 1
    # What no live token was written to may hold anything, not even a number.
    cache = torch.full((num_blocks, block_size, *row), float("nan"))
    history = {}
    for request, length, computed in zip(batch.rows, batch.seq_lens, batch.num_computed, strict=True):
        history[request] = rng.normal(size=(length, *row)).astype(np.float32)
        # What lies before every window may have been given to another request.
        for position in range(int(case.keys_of(request, computed)[0]), length):
            block = table.table[request, position // block_size]
            cache[block, position % block_size] = torch.from_numpy(history[request][position])
    key_value = np.zeros((num_tokens, *row), np.float32)
    for token, (request, position) in tokens.items():
        key_value[token] = history[request][position]
        cache[table.table[request, position // block_size], position % block_size] = 1e6

    query = rng.normal(size=(num_tokens, num_heads, head_size)).astype(np.float32)
    slopes = 0.3 ** np.arange(num_heads) if has_slopes else None
    sinks = None if sink is None else sink * np.linspace(0.5, 1, num_heads)
    UnequalHeadsBackend.set_head_size_v(value_size)
    impl = (PagedAttentionImpl if is_equal else UnequalHeadsImpl)(
        num_heads,
        head_size,
        head_size**-0.5,
        num_kv_heads,
        sliding_window=key_range.window or None,
        logits_soft_cap=cap,
        alibi_slopes=None if slopes is None else slopes.tolist(),
        sinks=None if sinks is None else torch.from_numpy(sinks.astype(np.float32)),
    )
    flat = torch.from_numpy(query.reshape(num_tokens, -1))
    key, value = (torch.from_numpy(each.reshape(num_tokens, -1)) for each in split(key_value))
    before = cache.clone()
    with loops_run_by(unrolled) if is_traced else nullcontext():
        out = impl.forward(None, flat, key, value, cache, metadata)  # type: ignore[arg-type]
    assert torch.isfinite(out).all()
    for token, (request, position) in tokens.items():
        keys, values = split(history[request])
        want = dense_attention(
            query[token], keys, values, position, key_range, cap, slopes, sinks, case.span_of(request, position)
        )
        np.testing.assert_allclose(out[token].reshape(num_heads, value_size), want, atol=2e-5)
        place = table.table[request, position // block_size], position % block_size
        np.testing.assert_array_equal(cache[place], history[request][position])
        before[place] = cache[place]
    before[0] = cache[0]
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("num_heads", [16, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_new", [1, 5], ids=["decode", "chunk"])
def test_scores_are_not_rounded_to_the_models_dtype(num_heads: int, dtype: torch.dtype, num_new: int) -> None:
    """Scores are as precise as in kernels of vLLM's other devices; here float16 has no number for the products."""
    head_size, length = 128, 256
    num_kv_heads = num_heads // 2
    batch = batch_of(np.array([num_new]), np.array([length - num_new]), np.array([0]))
    table = BlockTable(1, length, 16, 4)
    table.assign(0, list(range(1, length // 16 + 1)))
    case = Case(batch, CAUSAL, table, Tiling(1, 64), Tiling(16, 64), np.array([False]))
    size, metadata, _, tokens = pack(case, 0)
    rng = np.random.default_rng(0)
    query = torch.from_numpy(30 * rng.normal(size=(size.num_tokens, num_heads * head_size))).to(dtype)
    history = torch.from_numpy(rng.normal(size=(length, 2 * num_kv_heads, head_size))).to(dtype)
    history[:, :num_kv_heads] *= 200 if dtype == torch.float16 else 1
    cache = torch.zeros((length // 16 + 1, 16, 2 * num_kv_heads, head_size), dtype=dtype)
    cache[1:] = history.view(-1, 16, 2 * num_kv_heads, head_size)
    new = torch.zeros((size.num_tokens, 2 * num_kv_heads, head_size), dtype=dtype)
    for token, (_, position) in tokens.items():
        new[token] = history[position]
    key, value = (new[:, heads].flatten(1) for heads in (slice(num_kv_heads), slice(num_kv_heads, None)))
    impl = PagedAttentionImpl(num_heads, head_size, head_size**-0.5, num_kv_heads)
    out = impl.forward(None, query, key, value, cache, metadata)  # type: ignore[arg-type]
    exact = history.double().numpy()
    assert len(tokens) == num_new
    for token, (_, position) in tokens.items():
        want = dense_attention(
            query[token].view(num_heads, head_size).double().numpy(),
            exact[:, :num_kv_heads],
            exact[:, num_kv_heads:],
            position,
            CAUSAL,
            None,
        )
        error = np.abs(out[token].view(num_heads, head_size).double().numpy() - want).max()
        assert error < (0.03 if dtype == torch.bfloat16 else 0.004)
