"""Attention as one node of a captured graph.

Dynamo takes some 10 ms for every operation on symbolic sizes, and most of a layer's operations are attention. A graph
that is later run operation by operation, as on a lazy device, can be captured without a look inside attention: the
capture sees one call, and the shape of its result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan

Attend = Callable[[torch.Tensor, torch.Tensor, PagedAttentionMetadata], torch.Tensor]
_PLAN_FIELDS = tuple(field.name for field in fields(PairPlan))
_is_capturing = False


@contextmanager
def attention_as_one_node() -> Iterator[None]:
    """Makes attention one node of every graph that Dynamo captures inside the block.

    Such a graph must be run operation by operation, eagerly or lazily; neither Dynamo nor AOTAutograd may trace it
    again.
    """
    global _is_capturing
    before, _is_capturing = _is_capturing, True
    try:
        yield
    finally:
        _is_capturing = before


class OneNode:
    """Wrapper of a layer's ``attend``, which Dynamo takes for one operation inside ``attention_as_one_node``."""

    def __init__(self, attend: Attend, width: int, weights: list[torch.Tensor]) -> None:
        """Takes ``attend``, the ``width`` of its results, [T, width], and the ``weights`` that it reads."""

        def call(
            query: torch.Tensor,
            kv_cache: torch.Tensor,
            weights: list[torch.Tensor],  # Read by ``attend`` itself: named here, they are inputs of the graph.
            slots: list[torch.Tensor],
            num_decode_tokens: int,
            plans: list[dict[str, Any] | None],
        ) -> torch.Tensor:
            if isinstance(query, FakeTensor):  # Dynamo asks for the shape.
                return query.new_empty((query.shape[0], width))
            slot_blocks, slot_offsets = slots
            decode, chunks = (None if plan is None else PairPlan(**plan) for plan in plans)
            metadata = PagedAttentionMetadata(slot_blocks, slot_offsets, num_decode_tokens, decode, chunks)
            return attend(query, kv_cache, metadata)

        self._attend = attend
        self._weights = weights
        self._call = torch._dynamo.allow_in_graph(call)

    def __call__(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedAttentionMetadata) -> torch.Tensor:
        if not _is_capturing:
            return self._attend(query, kv_cache, metadata)
        plans = [_as_dict(metadata.decode), _as_dict(metadata.chunks)]
        slots = [metadata.slot_blocks, metadata.slot_offsets]
        return self._call(query, kv_cache, self._weights, slots, metadata.num_decode_tokens, plans)


def _as_dict(plan: PairPlan | None) -> dict[str, Any] | None:
    return None if plan is None else {name: getattr(plan, name) for name in _PLAN_FIELDS}
