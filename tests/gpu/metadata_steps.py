"""Random steps of requests for metadata builders, packed and bound as on a device, without the rest of a runner."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_cases import batch_of
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponents
from model_runner_base.step.packing import PackedStep, Packer
from model_runner_base.step.request_states import BlockTable, DeviceRows, RequestStates
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, Tiling

MAX_NUM_REQS, MAX_NUM_TOKENS, MAX_MODEL_LEN = 6, 24, 40
BLOCK_SIZES = {"local": 4, "global": 16}
LIMITS = StepLimits(MAX_NUM_TOKENS, MAX_NUM_REQS, MAX_MODEL_LEN, Tiling(1, 64), Tiling(64, 64))


class Builder:
    """Builder that returns the metadata that it is given."""

    reorder_batch_threshold = None

    def __init__(self, *args: Any) -> None:
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert common_prefix_len == 0
        return common_attn_metadata

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


class ViewsBackend:
    metadata_are_views = True

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class PlanningBackend(ViewsBackend):
    metadata_are_views = False


class Bench:
    """Builders' caches, block tables, tokens, their layout and the device's rows, without the rest of a runner."""

    def __init__(self, backend: type[ViewsBackend], limits: StepLimits = LIMITS) -> None:
        self.device_ops = DeviceOps(torch.device("cpu"))
        self.rows = DeviceRows(limits.max_num_reqs, self.device_ops, limits.decode.query)
        self.requests = RequestStates(limits.max_num_reqs, limits.max_model_len)
        self.tables = {
            name: BlockTable(limits.max_num_reqs, limits.max_model_len, block_size, 1)
            for name, block_size in BLOCK_SIZES.items()
        }
        groups = [
            AttentionGroup([name], table, table.block_size, table.block_size, backend=backend, spec="spec")  # type: ignore[arg-type]
            for name, table in self.tables.items()
        ]
        config: Any = SimpleNamespace()
        self.caches = BuilderCaches(groups, limits, config, self.device_ops)
        self.layout = make_layout([self.caches], limits)
        self.components = StepComponents([TokenInputs(self.requests), self.layout, self.caches])
        self.packer = Packer(self.components.checked_sections, self.device_ops)

    def run(self, batch: InputBatch | None, step: PackedStep) -> ModelCall:
        """Computes what a step's graph does."""
        self.components.prepare(batch, step, self.rows)
        call = ModelCall.unpack(step.size, step.on_device, step.sections, *self.rows.tensors[:2])
        self.components.bind(call, ())
        return call


@dataclass
class Request:
    row: int
    start: int
    count: int
    ahead: int | None
    """Tokens by which the host's bound exceeds a start that the device alone knows; None if the host knows it."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Request], StepSize]:
    """Requests in rows of their own, and a size that they are padded to."""
    is_decode = draw(st.booleans())
    rows = draw(st.lists(st.integers(0, MAX_NUM_REQS - 1), min_size=1, max_size=MAX_NUM_REQS, unique=True))
    requests, left = [], MAX_NUM_TOKENS - len(rows)
    for row in rows:
        start = draw(st.integers(0, MAX_MODEL_LEN - 1))
        count = 1 if is_decode else draw(st.integers(1, min(MAX_MODEL_LEN - start, 1 + left)))
        left -= count - 1
        knows = st.none() | st.integers(0, MAX_MODEL_LEN - 1 - start)
        requests.append(Request(row, start, count, draw(knows) if count == 1 else None))
    num_tokens, num_reqs = sum(request.count for request in requests), len(requests)
    if is_decode and draw(st.booleans()):
        padded = draw(st.integers(num_reqs, MAX_NUM_REQS))
        return requests, LIMITS.size(StepKind.DECODE, tokens=padded, requests=padded, logits=padded)
    padded = draw(st.integers(num_reqs, MAX_NUM_REQS))
    tokens = draw(st.integers(max(num_tokens, padded), MAX_NUM_TOKENS))
    return requests, LIMITS.size(StepKind.MIXED, tokens=tokens, requests=padded, logits=padded)


def fill(bench: Bench, requests: list[Request], size: StepSize) -> tuple[InputBatch, PackedStep]:
    """Packs and sends a step; the device's rows get the values that they have when it runs."""
    rows = np.array([request.row for request in requests])
    query_len = np.array([request.count for request in requests])
    num_computed = np.array([request.start + (request.ahead or 0) for request in requests])
    batch = batch_of(query_len, num_computed, rows)
    step = bench.packer.at(size)
    _, computed = bench.rows.tensors
    for request, bound in zip(requests, num_computed, strict=True):
        is_on_device = request.ahead is not None
        computed[request.row] = request.start if is_on_device else -9
        bench.requests.num_known[request.row] = bound if is_on_device else MAX_MODEL_LEN
    bench.components.fill(batch, size, step.views)
    step.send()
    return batch, step
