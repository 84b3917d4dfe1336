"""Blocks of caches that graphs replace: what is read and written of blocks, in numbers that are captured."""

from collections import Counter
from collections.abc import Callable, MutableSequence
from typing import Any

import numpy as np
import pytest
import torch

from model_runner_base.caches.cache_blocks import NUM_AT_ONCE, CacheBlocks, make_cache_blocks, pieces_of
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import GraphState

NUM_BLOCKS = 200
Caches = tuple[MutableSequence[torch.Tensor], dict[str, CacheBlocks], Counter[Any]]


@pytest.fixture
def caches() -> Caches:
    """Three caches of two shapes, of which one stores each block as two; and calls by their arguments' shapes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(NUM_BLOCKS, 4, 6), (NUM_BLOCKS, 4, 6), (2 * NUM_BLOCKS, 2, 3)]
    tensors = GraphState().hold([torch.rand(shape, generator=generator) for shape in shapes])
    calls: Counter[Any] = Counter()

    def replacing(function: Callable[..., Any], state: MutableSequence[torch.Tensor]) -> Callable[..., Any]:
        def call(*args: torch.Tensor) -> Any:
            calls[tuple(arg.shape for arg in args)] += 1
            old, state[0] = state[0], state[0].clone()
            result = function(*args)
            old.fill_(torch.nan)
            return result

        return call

    place_of = {"a": 1, "b": 0, "shares a": 1, "c": 2}
    rows, functions = make_cache_blocks(tensors, place_of, NUM_BLOCKS, replacing, DeviceOps(torch.device("cpu")))
    assert len(functions) == 2 and rows["a"] is rows["shares a"]
    for each in functions:
        each.warm_up()
    assert not tensors[0][0].isnan().any(), "warm-up writes to the null block alone"
    return tensors, rows, calls


@pytest.mark.parametrize(
    "blocks",
    [7, -1, [3], [9, 4, 5], slice(2, 80), np.array([1, 190]), torch.tensor([5, 6, 7]), range(20, 30), []],
    ids=str,
)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_blocks(name: str, blocks: Any, caches: Caches) -> None:
    """Blocks are those of a tensor that is indexed in the same way; nothing else changes."""
    tensors, rows, calls = caches
    warm = {*calls}
    before = [tensor.clone().view(NUM_BLOCKS, -1) for tensor in tensors]
    place = {"a": 1, "b": 0, "c": 2}[name]
    index = [*blocks] if isinstance(blocks, range) else blocks
    wanted = before[place][index]
    assert torch.equal(rows[name][blocks], wanted)
    rows[name][blocks] = 1 - wanted
    before[place][index] = 1 - wanted
    before[place][0] = tensors[place].view(NUM_BLOCKS, -1)[0]  # The null block.
    for tensor, want in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(NUM_BLOCKS, -1), want)
    rows[name][blocks] = 0.5
    assert bool((rows[name][blocks] == 0.5).all())
    assert {*calls} == warm and len(rows[name]) == NUM_BLOCKS


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 64, 65, 130])
def test_pieces(count: int) -> None:
    pieces = [*pieces_of(count)]
    assert {size for _, size in pieces} <= {*NUM_AT_ONCE}
    assert [first for first, _ in pieces] == [sum(size for _, size in pieces[:i]) for i in range(len(pieces))]
    assert count <= sum(size for _, size in pieces) and (count > 1 or len(pieces) == count)
