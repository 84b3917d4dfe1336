"""Caches of ranks that keep a part of each request's positions (decode context parallelism, DCP)."""

from collections.abc import Sequence
from typing import Self

from model_runner_base.attention.decode_context import ContextBackend, ContextPart
from model_runner_base.attention.plan import CAUSAL
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.errors import refuse
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.trace import LayerTrace


class ContextCaches(CacheKind):
    """Kind that turns plans over positions into plans over the rank's own keys; called after the kind that plans them.

    It sends nothing: the rank's numbers follow from the plan on the device. ``make`` raises UnsupportedConfigError for
    layers with another backend or key range, and for turns that do not divide a stored block.
    """

    def __init__(self, groups: Sequence[AttentionGroup], part: ContextPart) -> None:
        self._groups, self._part = groups, part

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        if model.vllm_config.parallel_config.decode_context_parallel_size == 1:
            return None
        part = ContextPart.of_this_rank(model.vllm_config)
        others = [
            group.layer_names[0]
            for group in model.groups
            if not issubclass(group.backend, ContextBackend) or group.key_range != CAUSAL or group.cross_len
        ]
        name = next(iter(others), None)
        stored = min(group.block_table.block_size for group in model.groups) // part.size
        refusals = {
            f"layers such as {name} are not cut over positions yet: use decode_context_parallel_size=1": others,
            f"blocks are stored in parts of {stored} tokens: use a cp_kv_cache_interleave_size that divides it, such "
            "as 1": stored % part.interleave,
        }
        refuse(refusals)
        return cls(model.groups, part)

    def bind(self, call: ModelCall) -> None:
        for group in self._groups:
            metadata = self._part.metadata_of(call.metadata[group.layer_names[0]])
            call.metadata.update(dict.fromkeys(group.layer_names, metadata))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
