"""Chosen kind of cache: layers that see what an indexer chose (sparse attention, DSA), on the plans of a paged kind.

Latents and an indexer's keys are in blocks of the same ids, and in one attention group, so the paged kind plans both.
This kind adds tables of the keys by position, which all indexers of a step read (attention/choice.py). It sends
nothing: the tables are made of the plans on the device.
"""

from collections.abc import Sequence
from typing import Self

from model_runner_base.attention.choice import KeyTable, SparseMetadata
from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.attention.sparse import SparseLatentBackend
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import paged_groups
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.trace import LayerTrace


class ChosenCaches(CacheKind):
    """Groups whose layers see chosen keys; called after the kind that plans them."""

    def __init__(self, groups: Sequence[AttentionGroup], max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [group for group in paged_groups(model) if issubclass(group.backend, SparseLatentBackend)]
        return cls(groups, model.limits.max_model_len) if groups else None

    def bind(self, call: ModelCall) -> None:
        for group in self._groups:
            metadata = self._metadata(call.metadata[group.layer_names[0]])
            call.metadata.update(dict.fromkeys(group.layer_names, metadata))

    def _metadata(self, planned: PagedAttentionMetadata) -> SparseMetadata:
        rows = chunks = None
        if planned.decode is not None:
            num_rows = planned.num_decode_tokens // planned.decode.last.shape[1]
            rows = KeyTable.of(planned.decode, num_rows, self._max_model_len)
        if planned.chunks is not None:
            assert planned.chunks.tile_tokens is not None
            chunks = KeyTable.of(planned.chunks, len(planned.chunks.tile_tokens), self._max_model_len)
        return SparseMetadata(planned, rows, chunks)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
