"""KV transfer: the worker half of a KV connector as a component of the step.

The connector loads blocks before a step is packed, and saves blocks after its last pass, that of a draft model
included. It is called from the host alone, so it is no part of a graph. Where graphs replace the caches
(``GraphPolicy.replaces_state``), it reads and writes blocks by captured functions of their own.
"""

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from model_runner_base.caches.cache_blocks import BlockFunctions, CacheBlocks, make_cache_blocks
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError, WeightUpdateError
from model_runner_base.runner.state_updates import StateUpdates
from model_runner_base.step.call import NO_FIELDS, Forward
from model_runner_base.step.components import StepComponent
from model_runner_base.step.graph_policy import GraphPolicy
from model_runner_base.step.schedule import Schedule
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout
from model_runner_base.vllm_compat.types.kv_connector import WorkerConnector


class KVTransfer(StepComponent):
    """Calls a connector in each step, also in those without tokens, by which the scheduler polls it."""

    def __init__(
        self,
        connector: WorkerConnector,
        updates: StateUpdates,
        context: ForwardContext,
        functions: Sequence[BlockFunctions],
        has_drafts: bool,
    ) -> None:
        """``functions``: captured ones that the connector calls; none where it gets tensors."""
        self._connector = connector
        self._updates = updates
        self._context = context
        self._functions = functions
        self._has_drafts = has_drafts
        self._finished: Collection[str] = ()

    def begin_step(self, schedule: Schedule) -> None:
        self._updates.take_back(schedule, self._has_drafts)
        self._finished = schedule.finished
        self._connector.begin(
            schedule.connector_metadata, schedule.preempted, bool(schedule.total_num_tokens), self._context
        )

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        with override_forward_context(self._context):
            output = self._connector.end(self._finished, forward is not None)
        return NO_FIELDS if output is None else {"kv_connector_output": output}

    def warm_up(self) -> None:
        for functions in self._functions:
            functions.warm_up()


class ConnectedCaches(NamedTuple):
    """Caches of all layers, and how code outside of the step reaches their blocks."""

    layout: CacheLayout
    groups: Sequence[AttentionGroup]
    tensors: MutableSequence[torch.Tensor]
    index_of: Mapping[str, Sequence[int]]
    """Indices of a layer's tensors, by the layer's name."""
    policy: GraphPolicy
    device_ops: DeviceOps


def transfer_components(
    connector: WorkerConnector | None,
    caches: ConnectedCaches,
    updates: StateUpdates,
    context: ForwardContext,
    has_drafts: bool,
) -> list[KVTransfer]:
    """Makes the component of a connector, and gives it the cache of each layer; none if there is no connector."""
    if connector is None:
        return []
    blocks, functions = blocks_by_layer(caches)
    if functions and connector.reads_storages:
        raise UnsupportedConfigError(
            "this vLLM keeps blocks on the host where caches are the same tensors in every step alone: leave out "
            "kv_offloading_size, or use a connector of your own"
        )
    connector.register(blocks)
    return [KVTransfer(connector, updates, context, functions, has_drafts)]


def check_new_weights(connector: WorkerConnector | None) -> None:
    """Raises WeightUpdateError if there is a connector: blocks elsewhere hold keys and values of the old weights, and
    not every connector forgets them."""
    if connector is not None:
        raise WeightUpdateError(
            "an engine with a KV connector keeps its weights: leave out kv_transfer_config and kv_offloading_size"
        )


def blocks_by_layer(
    caches: ConnectedCaches,
) -> tuple[Mapping[str, torch.Tensor] | Mapping[str, CacheBlocks], Sequence[BlockFunctions]]:
    """Blocks of each layer's cache, those of the scheduler, [blocks, numbers], and the captured functions that read and
    write them: none where the blocks are views of the caches.

    A block says nothing about heads and tokens, since the base's formats differ from vLLM's. Layers that share memory
    have views of the same memory, or the same blocks.
    """
    if foreign := [name for group in caches.groups if not group.reads_plans for name in group.layer_names]:
        raise UnsupportedConfigError(
            f"KV connectors are not supported with attention backends of their own yet, as that of {foreign[0]}: leave "
            "out kv_transfer_config and kv_offloading_size"
        )
    num_blocks = caches.layout.num_blocks
    place_of = {name: caches.index_of[name][0] for group in caches.layout.groups for name in group.layers}
    if caches.policy.replaces_state:
        return make_cache_blocks(caches.tensors, place_of, num_blocks, caches.policy.wrap, caches.device_ops)
    return {name: caches.tensors[place].view(num_blocks, -1) for name, place in place_of.items()}, ()
