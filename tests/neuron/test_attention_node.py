"""A capture sees attention as one node; run, the graph computes what attention does, with the weights of the day."""

import numpy as np
import pytest
import torch
import torch_xla

from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionImpl
from neuron_runner import compilation
from neuron_runner.compilation import CompiledFunction

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 8, 4


def attention_of_rows(
    impl: PagedAttentionImpl,
    query: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    kv_cache: torch.Tensor,
) -> torch.Tensor:
    """Attention in which row i of [R, H * D] sees the keys 0 to ``positions[i]`` of block ``blocks[i]``, where its
    own is written."""
    tiles = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    plan = PairPlan(
        block_size=BLOCK,
        kv_tile=BLOCK,
        pair_tile=tiles,
        pair_start=torch.zeros_like(tiles),
        pair_blocks=blocks.unsqueeze(1),
        last=positions.unsqueeze(1),
        first=None,
        merge_tree=[tiles.unsqueeze(1)],
    )
    metadata = PagedAttentionMetadata(blocks, positions % BLOCK, query.shape[0], plan, None)
    keys = query[:, : KV_HEADS * HEAD_SIZE]
    return impl.forward(None, query, keys, 2 * keys, kv_cache, metadata)  # type: ignore[arg-type]


def reference(
    query: np.ndarray, positions: np.ndarray, blocks: np.ndarray, kv_cache: np.ndarray, sinks: np.ndarray
) -> np.ndarray:
    """The same by loops over rows and heads; writes to the cache too."""
    keys = query[:, : KV_HEADS * HEAD_SIZE].reshape(-1, KV_HEADS, HEAD_SIZE)
    kv_cache[blocks, positions, :KV_HEADS], kv_cache[blocks, positions, KV_HEADS:] = keys, 2 * keys
    out = np.zeros((len(query), HEADS, HEAD_SIZE))
    for row, block in enumerate(blocks):
        for head in range(HEADS):
            seen = kv_cache[block, : positions[row] + 1]
            of = head // (HEADS // KV_HEADS)
            scores = seen[:, of] @ query[row].reshape(HEADS, HEAD_SIZE)[head] * 0.5
            weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
            out[row, head] = weights @ seen[:, KV_HEADS + of]
    return out.reshape(len(query), -1)


def test_one_capture_of_one_node_serves_all_sizes_and_later_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rng = torch_xla.device(), np.random.default_rng(0)
    sinks = rng.normal(size=HEADS)
    impl = PagedAttentionImpl(HEADS, HEAD_SIZE, 0.5, KV_HEADS, sinks=torch.tensor(sinks).float().to(device))
    cache = rng.normal(size=(9, BLOCK, 2 * KV_HEADS, HEAD_SIZE))
    state = [torch.tensor(cache).float().to(device)]

    captured = []
    trace = compilation._trace

    def keep(*arguments: object) -> object:
        result = trace(*arguments)  # type: ignore[arg-type]
        captured.append(result[0])
        return result

    monkeypatch.setattr(compilation, "_trace", keep)
    attend = CompiledFunction(
        lambda query, positions, blocks, kv_cache: attention_of_rows(impl, query, positions, blocks, kv_cache), state
    )
    for count, change in ((3, 0.0), (5, 0.0), (3, 1.5)):
        if change:
            sinks = sinks + change
            assert impl.sinks is not None
            impl.sinks.copy_(torch.tensor(sinks).float())
            torch_xla.sync()
        query = rng.normal(size=(count, HEADS * HEAD_SIZE))
        positions = rng.integers(0, BLOCK, count).astype(np.int32)
        blocks = rng.permutation(8)[:count].astype(np.int32)
        given = [torch.tensor(query).float(), torch.tensor(positions), torch.tensor(blocks)]
        out = attend(*(tensor.to(device) for tensor in given), state[0])
        wanted = reference(query, positions, blocks, cache, sinks)
        np.testing.assert_allclose(out.cpu().numpy(), wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[0].cpu().numpy(), cache, rtol=1e-6, atol=1e-6)
    assert len(captured) == 1
    names = [str(node.target) for node in captured[0].graph.nodes]
    assert not any("exp" in name or "matmul" in name for name in names), names
