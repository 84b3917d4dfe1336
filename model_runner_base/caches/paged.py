"""Paged groups without kernels: block-sparse plans for plain torch."""

from collections.abc import Sequence

import numpy as np

from model_runner_base.attention.trace import LayerTrace
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.plans import Plans
from model_runner_base.caches.spans import NO_SPANS, Spans
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.decode_rows import STARTS
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.rows_and_tiles import PairNeed, Placed
from model_runner_base.step.sizes import Dim, StepKind, StepLimits, StepSize, Tiling


def plan_dims(decode: Tiling, chunk: Tiling, cross_len: int = 0) -> tuple[Dim, ...]:
    """The dims of a step with plans. A pair costs the reading of its keys and the arithmetic of its queries.

    Each row and tile also meets the ``cross_len`` keys of an encoder's output.

    The weights lie between what was measured with a small model on a CPU, where pairs are dearer, and the arithmetic of
    a large model, where they are cheaper. A KV tile that is read in its line costs less than a gathered one
    (docs/kv_cache.md).
    """
    row, tile = (pair.keys / 64 * (1 + pair.query / 16) * cost for pair, cost in ((decode, 0.25), (chunk, 0.16)))
    cross_row, cross_tile = row * -(-cross_len // decode.keys), tile * -(-cross_len // chunk.keys)
    return (
        Dim("decode_rows", (cross_row, cross_row, 0.0)),
        Dim("decode_pairs", (row, row, 0.75 / 4)),
        Dim("chunk_tokens", (0.0, 0.0, 0.0)),
        Dim("chunk_tiles", (0.0, 1.0 + cross_tile, 0.0)),
        Dim("chunk_pairs", (0.0, tile, 0.0)),
    )


class PagedCaches(CacheKind):
    """Plans for every group, in steps that read the cache by pairs; steps by whole lines have no part of it."""

    reads = (STARTS,)

    def __init__(self, groups: Sequence[AttentionGroup], limits: StepLimits, spans: Spans = NO_SPANS) -> None:
        self._plans = Plans(groups, limits, spans)

    def need(self, placed: Placed) -> PairNeed:
        return self._plans.need(placed)

    def sections(self, size: StepSize) -> list[Section]:
        return [] if size.kind == StepKind.LINES else self._plans.sections(size)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind != StepKind.LINES:
            self._plans.fill(batch, size, views)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind != StepKind.LINES:
            self._plans.fill_padding(size, views)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart]:
        return () if step.size.kind == StepKind.LINES else self._plans.growing(batch, step)

    def bind(self, call: ModelCall) -> None:
        if call.size.kind != StepKind.LINES:
            self._plans.bind(call)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {} if call.size.kind == StepKind.LINES else self._plans.trace(call)
