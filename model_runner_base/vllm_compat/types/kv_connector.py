"""Worker half of vLLM's KV connectors: how it is made, and its calls in a step, which differ between releases."""

from collections.abc import Collection, Mapping
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.forward_context import ForwardContext
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

HAS_TRANSFER_RESULTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether a connector learns of preemptions by the metadata of each step, names requests whose loads failed, sends
metadata of its own to the scheduler, and saves in steps without tokens, too. So in vLLM 0.33, not in 0.16."""

OFFLOADING = "OffloadingConnector"
"""vLLM's connector that keeps blocks on the host."""
SEVERAL = "MultiConnector"
"""vLLM's connector that calls several others: it saves to all of them, and loads a request from one."""


def connector_class(transfer_config: Any) -> type:
    """Class of the connector that a ``KVTransferConfig`` names."""
    return KVConnectorFactory.get_connector_class(transfer_config)


def reports_figures(cls: Any) -> bool:
    """Whether a connector's class has figures for vLLM's log and metrics."""
    return cls.get_kv_connector_stats is not KVConnectorBase_V1.get_kv_connector_stats


def reports_events(cls: Any) -> bool:
    """Whether a connector's class has events of cache blocks."""
    return cls.get_kv_connector_kv_cache_events is not KVConnectorBase_V1.get_kv_connector_kv_cache_events


def shakes_hands(transfer_config: Any) -> bool:
    """Whether the connector of a ``KVTransferConfig`` has data that other engines need to reach its caches."""
    cls: Any = connector_class(transfer_config)
    return cls.get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata


def ends_by_groups_alone(cls: Any) -> bool:
    """Whether a connector's class is told by ``request_finished_all_groups`` alone that a request ends."""
    return issubclass(cls, SupportsHMA) and cls.request_finished is KVConnectorBase_V1.request_finished


def connector_configs(transfer_config: Any) -> list[Any]:
    """Configs of the connectors that move blocks: those that ``MultiConnector`` lists, or the given one."""
    if transfer_config.kv_connector != SEVERAL:
        return [transfer_config]
    listed = transfer_config.kv_connector_extra_config.get("connectors") or ()
    return [KVTransferConfig(**{"engine_id": transfer_config.engine_id} | options) for options in listed]


def connector_for_size(cache_config: Any) -> str:
    """Name of the connector that vLLM chooses for ``kv_offloading_size``, in place of one that the user named."""
    if cache_config.kv_offloading_backend == "lmcache":
        return "LMCacheMPConnector" if HAS_TRANSFER_RESULTS else "LMCacheConnectorV1"
    return "SimpleCPUOffloadConnector" if getattr(envs, "VLLM_USE_SIMPLE_KV_OFFLOAD", False) else OFFLOADING


class WorkerConnector:
    """Worker half of a KV connector.

    It is not vLLM's connector of the process (``get_kv_transfer_group``). vLLM's attention layers look for that one,
    and would call it inside of graphs; and a process may have several engines.
    """

    def __init__(self, connector: Any, names: Collection[str]) -> None:
        """``names``: those of the connectors that it calls, or its own."""
        self._connector = connector
        self._caches: Mapping[str, Any] = {}
        self._failed: set[int] = set()
        """Blocks that were not loaded, and of which the scheduler has not heard yet."""
        self.reads_storages = HAS_TRANSFER_RESULTS and OFFLOADING in names
        """Whether the connector reads the memory of the caches, so that it takes tensors alone."""

    def register(self, caches: Mapping[str, Any]) -> None:
        """Gives the connector the cache of each layer, [blocks, numbers]: a row for each of the scheduler's blocks.

        Caches are tensors, or objects that are indexed as these are.
        """
        self._caches = caches
        self._connector.register_kv_caches(dict(caches))

    def handshake(self) -> dict[Any, Any] | None:
        """Data that other engines need to reach this rank's caches, by rank; None if the connector has none."""
        data = self._connector.get_handshake_metadata()
        if data is None:
            return None
        rank = get_tp_group().rank_in_group
        return {(get_pp_group().rank_in_group, rank) if HAS_TRANSFER_RESULTS else rank: data}

    def begin(self, metadata: Any, preempted: Collection[str], has_tokens: bool, context: ForwardContext) -> None:
        """Begins a step, before any cache is written; returns when the blocks that the step reads are loaded."""
        connector = self._connector
        if HAS_TRANSFER_RESULTS:
            connector.handle_preemptions(metadata)
        elif preempted:
            connector.handle_preemptions(preempted)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(context)
        if has_tokens:
            for name in self._caches:
                connector.wait_for_layer_load(name)
        self._failed |= connector.get_block_ids_with_load_errors()
        if self._failed:
            # A part of a block may be there. If that is NaN, it would spoil other requests of the step.
            for cache in self._caches.values():
                cache[sorted(self._failed)] = 0

    def end(self, finished: Collection[str], has_tokens: bool) -> KVConnectorOutput | None:
        """Ends a step, when all of its keys and values are written; returns what the scheduler must hear of, if
        anything."""
        connector, output = self._connector, KVConnectorOutput()
        if HAS_TRANSFER_RESULTS:
            connector.finish_forward()
        if has_tokens:
            for name, cache in self._caches.items():
                connector.save_kv_layer(name, cache, None)
        if has_tokens or HAS_TRANSFER_RESULTS:
            connector.wait_for_save()
        if HAS_TRANSFER_RESULTS:
            results = connector.get_transfer_results(finished)
            output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
            output.failed_recving = results.failed_recving  # type: ignore[attr-defined]
        else:
            output.finished_sending, output.finished_recving = connector.get_finished(finished)
        output.invalid_block_ids, self._failed = self._failed | connector.get_block_ids_with_load_errors(), set()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        if HAS_TRANSFER_RESULTS:
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()  # type: ignore[attr-defined]
        connector.clear_connector_metadata()
        return None if output.is_empty() else output

    def shutdown(self) -> None:
        """Ends the connector's transfers."""
        self._connector.shutdown()


def make_connector(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerConnector | None:
    """Makes the connector that ``kv_transfer_config`` names; None if it names none. Parallel groups must exist."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return None
    # Ranks on several hosts may each have drawn a name of the engine.
    transfer.engine_id = get_tp_group().broadcast_object(transfer.engine_id, src=0)
    connector = KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
    )
    return WorkerConnector(connector, [config.kv_connector for config in connector_configs(transfer)])
