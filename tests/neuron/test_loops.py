"""Loops of graphs that are traced lazily: XLA's While, against Python's own loop."""

import numpy as np
import pytest
import torch
import torch_xla

from model_runner_base.attention.loops import FAR
from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionImpl
from neuron_runner.compilation import CompiledFunction
from neuron_runner.executable import Executable
from neuron_runner.loops import while_loop

TILES, PAIRS, REAL, KEYS = 7, 53, 41, 4
HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 8


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_loop_has_as_many_rounds_as_a_tensor_says(rounds: int) -> None:
    """The body reads tensors of the loop, a weight from outside, and a number; a state of two tensors changes."""
    device, rng = torch_xla.device(), np.random.default_rng(0)
    table, weight, start = rng.normal(size=(5, 4)), rng.normal(size=4), rng.normal(size=4)
    outside = torch.tensor(weight).float().to(device)
    torch_xla.sync()

    def body(
        piece: torch.Tensor, state: tuple[torch.Tensor, ...], reads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        total, largest = state
        row = reads[0][piece.view(1).long()][0]
        return total + row * outside * 2.5, torch.maximum(largest, row)

    given = [torch.tensor(rounds, dtype=torch.int32), *(torch.tensor(x).float() for x in (start, start, table))]
    given = [x.to(device) for x in given]
    torch_xla.sync()
    executable = Executable(
        lambda count, total, largest, rows: list(while_loop(count, 5, body, (total, largest), (rows,))),
        given,
        {index: index for index in range(4)},
    )
    executable.compile()
    total, largest = (x.cpu().numpy() for x in executable.run(given))
    np.testing.assert_allclose(total, start + (table[:rounds] * weight * 2.5).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(largest, np.concatenate([start[None], table[:rounds]]).max(axis=0), rtol=1e-6)


def attention_inputs() -> list[torch.Tensor]:
    """Queries, cache, and a plan of pairs, of which those after ``REAL`` are padding."""
    rng = np.random.default_rng(1)
    tile = np.sort(rng.integers(0, TILES, PAIRS))
    start, last = np.zeros(PAIRS), rng.integers(0, KEYS, (PAIRS, 1))
    start[REAL:], last[REAL:] = FAR, NEVER
    blocks = rng.integers(0, 20, (PAIRS, 1))
    query, cache = rng.normal(size=(TILES, HEADS * HEAD_SIZE)), rng.normal(size=(20, KEYS, 2 * KV_HEADS, HEAD_SIZE))
    floats = [torch.tensor(x).float() for x in (query, cache)]
    return [*floats, *(torch.tensor(x).int() for x in (tile, start, last, blocks))]


def attend(impl: PagedAttentionImpl, piece: int, *inputs: torch.Tensor) -> torch.Tensor:
    query, cache, tile, start, last, blocks = inputs
    plan = PairPlan(KEYS, KEYS, tile, start, blocks, last, None, [], piece=piece)
    slots = torch.zeros_like(tile[:TILES])
    metadata = PagedAttentionMetadata(slots, slots, TILES, plan, None)
    return impl.forward(None, query, None, None, cache, metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1, 8, 50])
def test_attention_in_pieces_is_the_same_in_all_loops(piece: int) -> None:
    """Python's loop, that of Dynamo's graphs, and XLA's While; dense attention in NumPy is the reference."""
    impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
    inputs, device = attention_inputs(), torch_xla.device()
    query, cache, tile, _, last, blocks = (x.double().numpy() for x in inputs)
    want = np.zeros((TILES, HEADS, HEAD_SIZE))
    for row in range(TILES):
        pairs = [pair for pair in range(REAL) if tile[pair] == row]
        seen = [cache[int(blocks[pair, 0]), : int(last[pair, 0]) + 1] for pair in pairs]
        for head in range(HEADS if seen else 0):
            entries, of = np.concatenate(seen), head // (HEADS // KV_HEADS)
            scores = np.exp(entries[:, of] @ query[row].reshape(HEADS, -1)[head] * HEAD_SIZE**-0.5)
            want[row, head] = scores @ entries[:, KV_HEADS + of] / scores.sum()
    compiled = CompiledFunction(lambda *given: attend(impl, piece, *given), [])
    traced = torch.compile(lambda *given: attend(impl, piece, *given), backend="aot_eager", fullgraph=True)
    for is_spoilt in (False, True):
        if is_spoilt:
            inputs[0][2] = torch.nan  # What one request has computed reaches no other.
            want[2] = np.nan
        on_device = [x.to(device) for x in inputs]
        torch_xla.sync()
        with torch.no_grad():
            outs = [attend(impl, piece, *inputs), compiled(*on_device).cpu(), traced(*inputs)]
        for out in outs:
            np.testing.assert_allclose(out.numpy(), want.reshape(TILES, -1), atol=2e-5)
