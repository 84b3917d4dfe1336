"""Decode attention under openxla on a paged and on a contiguous cache, by whole cache lines and tile by tile.

One layer, every case compiled for exactly what it needs, the fastest of its runs: `paged` with blocks of 32, `tiles`
the same plan on a contiguous cache, `lines` the front of every cache line as one slice, in use or not.

    python -m benchmarks.cache_layout
"""

from functools import partial

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from benchmarks.attention import HEAD_SIZE, HEADS, KV_HEADS, KV_TILE, decode_batch, pack, sections
from benchmarks.report import interleaved, parse, show
from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.lines import ContiguousAdapter
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import PlanGeometry
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import unpack
from neuron_runner.allocator import keep_freed_memory
from neuron_runner.compilation import CompiledFunction

MAX_LENGTH, LINES = 2048, 32

CASES = {
    "32 of 32 lines, 256": [256] * LINES,
    "32 of 32 lines, 1024": [1024] * LINES,
    "32 of 32 lines, 2048": [2048] * LINES,
    "32 of 32 lines, 64..2048": np.linspace(64, 2048, LINES).astype(int).tolist(),
    "8 of 32 lines, 1024": [1024] * 8,
}


class Layer:
    """One attention layer with its cache on the device, of LINES requests' room."""

    def __init__(self, block_size: int) -> None:
        stored = min(block_size, KV_TILE)
        parts, blocks = block_size // stored, MAX_LENGTH // block_size
        self.table = BlockTable(LINES, MAX_LENGTH, stored, KV_TILE // stored, parts)
        order = np.random.default_rng(0).permutation(LINES * blocks) + 1
        for row in range(LINES):
            self.table.assign(row, order[row * blocks : (row + 1) * blocks].tolist())
        geometry = PlanGeometry(stored, KV_TILE, MAX_LENGTH // KV_TILE)
        limits = StepLimits(LINES, LINES, MAX_LENGTH, 16, KV_TILE, LINES)
        self.adapter = ContiguousAdapter([AttentionGroup(["layer"], self.table, geometry)], limits)
        self.impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
        shape = ((LINES * blocks + 1) * parts, stored, 2 * KV_HEADS, HEAD_SIZE)
        self.cache = [torch.randn(shape).to(torch_xla.device())]
        torch_xla.sync()
        self.compiled = CompiledFunction(self._attend, self.cache)

    def _attend(
        self, size: GraphSize, packed: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self.adapter.build(size, unpack(packed, sections(self.adapter, size)))["layer"]
        return self.impl.forward(None, query, key_value, key_value, self.cache[0], metadata)  # type: ignore[arg-type]

    def step(self, lengths: list[int], way: int) -> partial:
        """A decode step over rows of these lengths, in one of the adapter's ways, to be called and waited for."""
        batch = decode_batch(lengths)
        plans = self.adapter.plan(batch)
        size = self.adapter.needed_sizes(batch, plans)[way]
        packed = pack(self.adapter, batch, plans, size)
        inputs = [packed, torch.randn(len(lengths), HEADS * HEAD_SIZE), torch.randn(len(lengths), KV_HEADS * HEAD_SIZE)]
        return partial(self._run, size, *(tensor.to(torch_xla.device()) for tensor in inputs))

    def _run(self, size: GraphSize, *inputs: torch.Tensor) -> None:
        self.compiled(size, *inputs)
        xm.wait_device_ops()


def main() -> None:
    args = parse(__doc__)
    keep_freed_memory()  # As the worker does.
    paged, contiguous = Layer(32), Layer(MAX_LENGTH)
    rows = []
    with torch.no_grad():
        for name, lengths in CASES.items():
            ways = {
                "paged": paged.step(lengths, 0),
                "tiles": contiguous.step(lengths, 0),
                "lines": contiguous.step(lengths, 1),
            }
            times = interleaved(ways, args.repeats, min)
            rows.append(
                {"rows": name}
                | {f"{way}_ms": ms for way, ms in times.items()}
                | {"lines_to_paged": times["lines"] / times["paged"]}
            )
    show(rows, args.json)


if __name__ == "__main__":
    main()
