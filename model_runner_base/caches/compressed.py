"""Tables of the places of a request's tokens, for layers that compress them to entries (DeepSeek V4)."""

from collections.abc import Sequence
from typing import Self

from model_runner_base.attention.choice import KeyTable
from model_runner_base.attention.compressed import CompressedBackend, CompressedMetadata
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import paged_groups
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.trace import LayerTrace


class CompressedCaches(CacheKind):
    """Kind of rows of tokens, and of the entries that they are compressed to; called after the kind that plans them.

    They are in blocks of the same ids, and in one attention group, which ``PagedCaches`` plans. A window's keys are in
    the same blocks, in an attention group of their own. This kind adds tables of places, made of the plans on the
    device; it sends nothing.
    """

    def __init__(self, groups: Sequence[AttentionGroup], max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [
            group
            for group in paged_groups(model)
            if issubclass(group.backend, CompressedBackend) and not group.key_range.window
        ]
        return cls(groups, model.limits.max_model_len) if groups else None

    def bind(self, call: ModelCall) -> None:
        for group in self._groups:
            planned = call.metadata[group.layer_names[0]]
            rows = chunks = None
            if planned.decode is not None:
                num_rows = planned.num_decode_tokens // planned.decode.last.shape[1]
                rows = KeyTable.of(planned.decode, num_rows, self._max_model_len)
            if planned.chunks is not None:
                chunks = KeyTable.of(planned.chunks, len(planned.chunks.tile_tokens), self._max_model_len)
            call.metadata.update(dict.fromkeys(group.layer_names, CompressedMetadata(planned, rows, chunks)))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
