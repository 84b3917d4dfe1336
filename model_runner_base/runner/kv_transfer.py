"""KV transfer: the worker half of a KV connector as a component of the step.

The connector loads blocks before a step is packed, and saves blocks after its last pass, that of a draft model
included. It is called from the host alone, so it is no part of a graph, and the caches must be the same tensors in
every step (``PagedPlatform.serves_connectors``).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import ForwardContext

from model_runner_base.caches.group import AttentionGroup
from model_runner_base.errors import UnsupportedConfigError, WeightUpdateError
from model_runner_base.runner.state_updates import StateUpdates
from model_runner_base.step.call import NO_FIELDS, Forward
from model_runner_base.step.components import StepComponent
from model_runner_base.step.schedule import Schedule
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout
from model_runner_base.vllm_compat.types.kv_connector import WorkerConnector


class KVTransfer(StepComponent):
    """Calls a connector in each step, also in those without tokens, by which the scheduler polls it."""

    def __init__(self, connector: WorkerConnector, updates: StateUpdates, context: ForwardContext) -> None:
        self._connector = connector
        self._updates = updates
        self._context = context
        self._finished: Collection[str] = ()

    def begin_step(self, schedule: Schedule) -> None:
        self._updates.take_back(schedule)
        self._finished = schedule.finished
        self._connector.begin(
            schedule.connector_metadata, schedule.preempted, bool(schedule.total_num_tokens), self._context
        )

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        output = self._connector.end(self._finished, forward is not None)
        return NO_FIELDS if output is None else {"kv_connector_output": output}


def transfer_components(
    connector: WorkerConnector | None,
    layout: CacheLayout,
    groups: Sequence[AttentionGroup],
    caches: Mapping[str, torch.Tensor],
    updates: StateUpdates,
    context: ForwardContext,
) -> list[KVTransfer]:
    """Makes the component of a connector, and gives it the cache of each layer; none if there is no connector."""
    if connector is None:
        return []
    connector.register(blocks_by_layer(layout, groups, caches))
    return [KVTransfer(connector, updates, context)]


def check_new_weights(connector: WorkerConnector | None) -> None:
    """Raises WeightUpdateError if there is a connector: blocks elsewhere hold keys and values of the old weights, and
    not every connector forgets them."""
    if connector is not None:
        raise WeightUpdateError(
            "an engine with a KV connector keeps its weights: leave out kv_transfer_config and kv_offloading_size"
        )


def blocks_by_layer(
    layout: CacheLayout, groups: Sequence[AttentionGroup], caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """View of each layer's cache with a row for each of the scheduler's blocks, [blocks, numbers].

    Rows say nothing about heads and tokens, since the base's formats differ from vLLM's. Layers that share memory have
    views of the same memory.
    """
    if foreign := [name for group in groups if not group.reads_plans for name in group.layer_names]:
        raise UnsupportedConfigError(
            f"KV connectors are not supported with attention backends of their own yet, as that of {foreign[0]}: leave "
            "out kv_transfer_config and kv_offloading_size"
        )
    return {name: caches[name].view(layout.num_blocks, -1) for group in layout.groups for name in group.layers}
