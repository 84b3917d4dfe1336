"""Attention in pieces, and experts in rounds, are the same in all loops: Python's, that of Dynamo's graphs, XLA's
While."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from lane import HAS_OPENXLA

from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import FAR
from model_runner_base.models.layers import fused_moe
from model_runner_base.models.layers.fused_moe import Experts, run_experts

TILES, PAIRS, REAL, KEYS = 7, 53, 41, 4
HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 8


def attention_inputs() -> tuple[list[np.ndarray], torch.Tensor]:
    """Queries and cache; and a plan's tile, start, last position and block of each pair, in one buffer as in a step.

    Pairs after ``REAL`` are padding.
    """
    rng = np.random.default_rng(1)
    tile = np.sort(rng.integers(0, TILES, PAIRS))
    start, last = np.zeros(PAIRS), rng.integers(0, KEYS, PAIRS)
    start[REAL:], last[REAL:] = FAR, NEVER
    blocks = rng.integers(0, 20, PAIRS)
    query, cache = rng.normal(size=(TILES, HEADS * HEAD_SIZE)), rng.normal(size=(20, KEYS, 2 * KV_HEADS, HEAD_SIZE))
    return [query, cache], torch.tensor(np.stack([tile, start, last, blocks])).int()


def attend(
    impl: PagedAttentionImpl, piece: int, query: torch.Tensor, cache: torch.Tensor, plan: torch.Tensor
) -> torch.Tensor:
    tile, start, last, blocks = plan.unbind()
    pairs = PairPlan(KEYS, KEYS, tile, start, blocks.view(-1, 1), last.view(-1, 1), None, [], piece=piece)
    slots = torch.zeros_like(tile[:TILES])
    metadata = PagedAttentionMetadata(slots, slots, TILES, pairs, None)
    return impl.forward(None, query, None, None, cache, metadata)  # type: ignore[arg-type]


def dense(query: np.ndarray, cache: np.ndarray, plan: np.ndarray) -> np.ndarray:
    """Attention of each row to all that it sees, at once."""
    tile, _, last, blocks = plan
    want = np.zeros((TILES, HEADS, HEAD_SIZE))
    for row in range(TILES):
        seen = [cache[blocks[pair], : last[pair] + 1] for pair in range(REAL) if tile[pair] == row]
        for head in range(HEADS if seen else 0):
            entries, of = np.concatenate(seen), head // (HEADS // KV_HEADS)
            scores = np.exp(entries[:, of] @ query[row].reshape(HEADS, -1)[head] * HEAD_SIZE**-0.5)
            want[row, head] = scores @ entries[:, KV_HEADS + of] / scores.sum()
    return want.reshape(TILES, -1)


def on_openxla(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    import torch_xla

    from neuron_runner.compilation import CompiledFunction

    compiled = CompiledFunction(function, [])

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        on_device = [x.to(torch_xla.device()) for x in inputs]
        torch_xla.sync()
        return compiled(*on_device).cpu()

    return run


@pytest.mark.parametrize("piece", [0, 1, 8, 50])
def test_attention_in_pieces_is_the_same_in_all_loops(piece: int) -> None:
    impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
    (query, cache), plan = attention_inputs()
    want = dense(query, cache, plan.numpy())

    def function(*given: torch.Tensor) -> torch.Tensor:
        return attend(impl, piece, *given)

    loops = [function, torch.compile(function, backend="aot_eager", fullgraph=True)]
    loops += [on_openxla(function)] if HAS_OPENXLA else []
    for is_spoilt in (False, True):
        if is_spoilt:
            query[2] = want[2] = np.nan  # What one request has computed reaches no other.
        with torch.no_grad():
            outs = [run(torch.tensor(query).float(), torch.tensor(cache).float(), plan) for run in loops]
        for out in outs:
            np.testing.assert_allclose(out.numpy(), want, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [2, 90], ids=["each choice", "in tiles"])
def test_experts_in_rounds_are_the_same_in_all_loops(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts at a time are as many as fit the memory; of 24 experts few are chosen, so many tiles are empty."""
    num_experts, hidden, inner, top_k = 24, 8, 6, 3
    monkeypatch.setattr(fused_moe, "GATHERED_AT_ONCE", 2 * 4 * 3 * hidden * inner)
    rng = np.random.default_rng(0)
    gate_up, down = (rng.normal(size=(num_experts, *shape)) for shape in ((hidden, 2 * inner), (inner, hidden)))
    rows, weights = rng.normal(size=(num_tokens, hidden)), rng.normal(size=(num_tokens, top_k))
    ids = np.stack([rng.choice(5, top_k, replace=False) * 5 % num_experts for _ in range(num_tokens)])
    want = np.zeros_like(rows)
    for token, choice in np.ndindex(ids.shape):
        gate, up = np.split(rows[token] @ gate_up[ids[token, choice]], 2)
        want[token] += weights[token, choice] * ((gate / (1 + np.exp(-gate)) * up) @ down[ids[token, choice]])

    def function(*given: torch.Tensor) -> torch.Tensor:
        gate_up, down, rows, ids, weights = given
        return run_experts(Experts(gate_up, down, "silu"), rows, ids, weights)

    inputs = [torch.tensor(each).float() for each in (gate_up, down, rows, weights)]
    inputs.insert(3, torch.tensor(ids))
    loops = [function, torch.compile(function, backend="aot_eager", fullgraph=True)]
    loops += [on_openxla(function)] if HAS_OPENXLA else []
    with torch.no_grad():
        for run in loops:
            np.testing.assert_allclose(run(*inputs).numpy(), want, atol=1e-4)
