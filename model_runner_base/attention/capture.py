"""Attention as one node of a captured graph: most of a layer's operations are attention."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.step.one_node import OneNode, is_capturing

Attend = Callable[[torch.Tensor, torch.Tensor, PagedAttentionMetadata], torch.Tensor]
_PLAN_FIELDS = tuple(field.name for field in fields(PairPlan))


class AttentionNode:
    """Wrapper of a layer's ``attend``, which Dynamo takes for one operation inside ``functions_as_one_node``."""

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
            slot_blocks, slot_offsets = slots
            decode, chunks = (None if plan is None else PairPlan(**plan) for plan in plans)
            metadata = PagedAttentionMetadata(slot_blocks, slot_offsets, num_decode_tokens, decode, chunks)
            return attend(query, kv_cache, metadata)

        self._attend = attend
        self._weights = weights
        self._call = OneNode(call, lambda query: query.new_empty((query.shape[0], width)))

    def __call__(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedAttentionMetadata) -> torch.Tensor:
        if not is_capturing():
            return self._attend(query, kv_cache, metadata)
        plans = [_as_dict(metadata.decode), _as_dict(metadata.chunks)]
        slots = [metadata.slot_blocks, metadata.slot_offsets]
        return self._call(query, kv_cache, self._weights, slots, metadata.num_decode_tokens, plans)


def _as_dict(plan: PairPlan | None) -> dict[str, Any] | None:
    return None if plan is None else {name: getattr(plan, name) for name in _PLAN_FIELDS}
