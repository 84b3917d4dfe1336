"""Tables of the places of a request's tokens, for layers that compress them to entries (DeepSeek V4)."""

from collections.abc import Sequence
from typing import Self

from model_runner_base.attention.choice import KeyTable
from model_runner_base.attention.compressed import CompressedBackend, CompressedMetadata
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import paged_groups
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.trace import LayerTrace


class CompressedCaches(CacheKind):
    """Kind of rows of tokens, of the entries that they are compressed to, and of a window's keys beside them; called
    after the kind that plans them.

    ``PagedCaches`` plans their groups: those of entries, which are kept for a whole request, and those of windows. This
    kind adds tables of places, made of the plans on the device; it sends nothing.
    """

    def __init__(self, groups: Sequence[AttentionGroup], max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [group for group in paged_groups(model) if issubclass(group.backend, CompressedBackend)]
        return cls(groups, model.limits.max_model_len) if groups else None

    def bind(self, call: ModelCall) -> None:
        for number, group in enumerate(self._groups):
            planned = call.metadata[group.layer_names[0]]
            rows = chunks = None
            if planned.decode is not None:
                num_rows = planned.num_decode_tokens // planned.decode.last.shape[1]
                rows = self._table(group, planned.decode, num_rows)
            if planned.chunks is not None:
                chunks = self._table(group, planned.chunks, len(planned.chunks.tile_tokens))
            step = CompressedMetadata(number, planned, rows, chunks, group.block_table.blocks_per_kv_block)
            call.metadata.update(dict.fromkeys(group.layer_names, step))

    def _table(self, group: AttentionGroup, plan: PairPlan, num_tiles: int) -> KeyTable:
        if group.key_range.window:
            return KeyTable.of_window(plan, num_tiles, group.key_range.window)
        return KeyTable.of(plan, num_tiles, self._max_model_len)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
