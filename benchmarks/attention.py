"""Attention under openxla against the tokens that exist: eight decode rows of mixed and of uniform length.

The plan's pairs, not rows x longest context, are what a step pays for. Each line is one layer's attention, compiled for
exactly the pairs that the plan needs; `dense_ms` is what the same rows would cost if every one were as long as the
longest.

    python -m benchmarks.attention
"""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from benchmarks.report import interleaved, parse, show
from model_runner_base.attention.adapter import AttentionGroup
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import AttentionPlan, PlanGeometry
from model_runner_base.attention_metadata import PagedAttentionAdapter
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import InputBatch, PackedStep, Section, unpack
from neuron_runner.compilation import CompiledFunction

HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 64
MAX_LENGTH, BLOCK_SIZE, KV_TILE = 8192, 32, 64

CASES = {
    "mixed 256..8192": [256, 512, 768, 1024, 2048, 4096, 6144, 8192],
    "uniform, same tokens": [2880] * 8,
    "uniform 8192": [8192] * 8,
    "uniform 1024": [1024] * 8,
    "uniform 256": [256] * 8,
}


class Layer:
    """One attention layer with its cache on the device."""

    def __init__(self) -> None:
        rows = 8
        blocks = MAX_LENGTH // BLOCK_SIZE
        self.table = BlockTable(rows, MAX_LENGTH, BLOCK_SIZE, KV_TILE // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(rows * blocks) + 1
        for row in range(rows):
            self.table.assign(row, order[row * blocks : (row + 1) * blocks].tolist())
        geometry = PlanGeometry(BLOCK_SIZE, KV_TILE, MAX_LENGTH // KV_TILE)
        limits = StepLimits(rows, rows, MAX_LENGTH, 16, KV_TILE)
        self.adapter = PagedAttentionAdapter([AttentionGroup(["layer"], self.table, geometry)], limits)
        self.impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
        self.cache = [torch.randn(rows * blocks + 1, BLOCK_SIZE, 2 * KV_HEADS, HEAD_SIZE).to(torch_xla.device())]
        torch_xla.sync()
        self.compiled = CompiledFunction(self._attend, self.cache)

    def _attend(
        self, size: GraphSize, packed: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self.adapter.build(size, unpack(packed, sections(self.adapter, size)))["layer"]
        return self.impl.forward(None, query, key_value, key_value, self.cache[0], metadata)  # type: ignore[arg-type]

    def prepare(self, lengths: list[int]) -> tuple[int, GraphSize, list[torch.Tensor]]:
        """The pairs of a decode step over rows of these lengths, its size and its inputs."""
        batch = decode_batch(lengths)
        plans = self.adapter.plan(batch)
        (size,) = self.adapter.needed_sizes(batch, plans)
        packed = pack(self.adapter, batch, plans, size)
        inputs = [packed, torch.randn(len(lengths), HEADS * HEAD_SIZE), torch.randn(len(lengths), KV_HEADS * HEAD_SIZE)]
        return plans[0].num_pairs, size, [tensor.to(torch_xla.device()) for tensor in inputs]


def decode_batch(lengths: list[int]) -> InputBatch:
    """Row after row decodes, each at the end of its context."""
    rows, ones = np.arange(len(lengths)), np.ones(len(lengths), np.int64)
    computed = np.array(lengths) - 1
    return InputBatch(
        req_ids=[str(row) for row in rows],
        num_tokens=len(rows),
        rows=rows,
        query_len=ones,
        query_start=rows,
        num_computed=computed,
        seq_lens=computed + 1,
        is_sampled=ones.astype(bool),
        num_sampled=len(lengths),
    )


def sections(adapter: PagedAttentionAdapter, size: GraphSize) -> list[Section]:
    """What attention reads of the packed buffer."""
    return [Section("positions", (size.num_tokens,)), *adapter.sections(size)]


def pack(
    adapter: PagedAttentionAdapter, batch: InputBatch, plans: list[AttentionPlan], size: GraphSize
) -> torch.Tensor:
    """These sections, packed, on the host."""
    packed = PackedStep(size, sections(adapter, size))
    packed.views["positions"][:] = batch.num_computed
    adapter.pack(batch, plans, size, packed.views)
    return torch.from_numpy(packed.buffer)


def main() -> None:
    args = parse(__doc__)
    layer = Layer()
    prepared = {name: layer.prepare(lengths) for name, lengths in CASES.items()}

    def runner(name: str):
        _, size, inputs = prepared[name]

        def run() -> None:
            layer.compiled(size, *inputs)
            xm.wait_device_ops()

        return run

    with torch.no_grad():
        times = interleaved({name: runner(name) for name in CASES}, args.repeats)
    dense = times["uniform 8192"]
    rows = [
        {
            "rows": name,
            "tokens": sum(lengths),
            "pairs": prepared[name][0],
            "ms": times[name],
            "us_per_pair": times[name] / prepared[name][0] * 1e3,
            "dense_ms": dense * max(lengths) / MAX_LENGTH,
        }
        for name, lengths in CASES.items()
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
