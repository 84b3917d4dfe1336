"""Time of attention under openxla against the tokens that exist: eight decode rows of mixed and of uniform length.

A step pays for the plan's pairs, not for rows x longest context. Each line is one layer's attention, compiled for
exactly the pairs that the plan needs; `dense_ms` is what the same rows would cost if every one were as long as the
longest.

    python -m benchmarks.attention
"""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from vllm import SamplingParams

from benchmarks.graphs import Graph
from benchmarks.report import interleaved, parse, show
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.caches.contiguous_decode import ContiguousDecode
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import AttentionGroup, CacheKind, bind_step
from model_runner_base.caches.paged import PagedCaches, plan_dims
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.requests.device_rows import DeviceRows
from model_runner_base.requests.states import RequestInfo, RequestStates
from model_runner_base.step.builder import BatchBuilder
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponents
from model_runner_base.step.packing import Packer
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, StepSize, Tiling
from neuron_runner.compilation import CompiledFunction
from neuron_runner.device_ops import XlaDeviceOps

HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 64
MAX_LENGTH, BLOCK_SIZE = 8192, 32
DECODE, CHUNK = Tiling(1, 64), Tiling(64, 128)

CASES = {
    "mixed 256..8192": [256, 512, 768, 1024, 2048, 4096, 6144, 8192],
    "uniform, same tokens": [2880] * 8,
    "uniform 8192": [8192] * 8,
    "uniform 1024": [1024] * 8,
    "uniform 256": [256] * 8,
}


class Layer:
    """One attention layer with its cache on the device, for ``rows`` requests, and the parts that plan its steps."""

    def __init__(self, rows: int, max_length: int, block_size: int) -> None:
        stored, lines = min(block_size, DECODE.keys), rows if block_size == max_length else 0
        parts, blocks = block_size // stored, max_length // block_size
        table = BlockTable(rows, max_length, stored, CHUNK.keys // stored, parts)
        order = np.random.default_rng(0).permutation(rows * blocks) + 1
        for row in range(rows):
            table.assign(row, order[row * blocks : (row + 1) * blocks].tolist())
        dims = (*COMMON_DIMS, *plan_dims(DECODE, CHUNK))
        limits = StepLimits(rows, rows, max_length, DECODE, CHUNK, dims, lines)
        device = torch_xla.device()
        device_ops = XlaDeviceOps(device)
        groups = [AttentionGroup(["layer"], table, DECODE.keys, CHUNK.keys)]
        self._caches: list[CacheKind] = [PagedCaches(groups, limits)]
        if lines:
            self._caches.append(ContiguousDecode(groups, limits))
        self._layout = make_layout(self._caches, limits)
        self._requests = RequestStates(rows, max_length)
        self._device_rows = DeviceRows(rows, device_ops)
        self._components = StepComponents([TokenInputs(self._requests), self._layout, *self._caches])
        self._packer = Packer(self._components.checked_sections, device_ops)
        self._impl = PagedAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
        cache = torch.randn((rows * blocks + 1) * parts, stored, 2 * KV_HEADS, HEAD_SIZE).to(device)
        torch_xla.sync()
        self._state = [cache]
        self._compiled = CompiledFunction(self._attend, self._state)

    def _attend(
        self,
        size: StepSize,
        packed: torch.Tensor,
        tokens: torch.Tensor,
        computed: torch.Tensor,
        query: torch.Tensor,
        key_value: torch.Tensor,
    ) -> torch.Tensor:
        call = ModelCall.unpack(size, packed, self._components.sections(size), tokens, computed)
        bind_step(self._layout, self._caches, call)
        metadata = call.metadata["layer"]
        return self._impl.forward(None, query, key_value, key_value, self._state[0], metadata)  # type: ignore[arg-type]

    def decode(self, lengths: list[int], kind: StepKind = StepKind.DECODE) -> Graph:
        """Decode of rows of these lengths, by pairs or by whole cache lines, to be run and waited for."""
        names = [f"{index}" for index in range(len(lengths))]
        for name, length in zip(names, lengths, strict=True):
            info = RequestInfo(SamplingParams(), seed=0, prompt_token_ids=[0] * length)
            self._requests.admit(name, info, info.prompt_token_ids, length - 1)
        step_of_all = Schedule(set(), (), [], names, [None] * len(names), dict.fromkeys(names, 1), len(names))
        batch = BatchBuilder(self._requests, self._layout.order).build(step_of_all)
        (size,) = (size for size in self._layout.needs(batch) if size.kind == kind)
        step = self._packer.at(size)
        self._components.fill(batch, size, step.views)
        step.send()
        for name in reversed(names):  # The requests of the next batch get the same rows.
            self._requests.forget(name)
        widths = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        inputs = [torch.randn(len(lengths), width).to(step.on_device.device) for width in widths]
        packed = step.on_device  # Batches of the same size share a step.

        def run() -> None:
            self._compiled(size, packed, *self._device_rows.tensors, *inputs)
            xm.wait_device_ops()

        return Graph(size, run)


def main() -> None:
    args = parse(__doc__)
    layer = Layer(8, MAX_LENGTH, BLOCK_SIZE)
    graphs = {name: layer.decode(lengths) for name, lengths in CASES.items()}
    pairs = {name: sum(-(-length // DECODE.keys) for length in lengths) for name, lengths in CASES.items()}
    with torch.no_grad():
        times = interleaved({name: graph.run for name, graph in graphs.items()}, args.repeats)
    dense = times["uniform 8192"]
    rows = [
        {
            "rows": name,
            "tokens": sum(lengths),
            "pairs": pairs[name],
            "ms": times[name],
            "us_per_pair": times[name] / pairs[name] * 1e3,
            "dense_ms": dense * max(lengths) / MAX_LENGTH,
        }
        for name, lengths in CASES.items()
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
