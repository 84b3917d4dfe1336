"""Decides which schedulers may keep requests in rows."""

from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from model_runner_base.scheduling.releases import unserved_features
from model_runner_base.scheduling.state_group import StateManager

HOOKS = (
    "schedule",
    "update_from_output",
    "_update_after_schedule",
    "_make_cached_request_data",
    "_build_kv_connector_meta",
    "_update_request_with_output",
    "get_grammar_bitmask",
)
"""Methods of vLLM's scheduler that never see requests in rows, or are called for other requests only."""


def unsupported_reason(scheduler: Scheduler, mixin: type) -> str | None:
    """Name of a feature of the scheduler that rows do not support; None if they support all."""
    config, manager = scheduler.vllm_config, scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    kinds = {type(each) for each in groups}
    attention = [each for each in groups if type(each) is not StateManager]
    reasons = {
        # As OffloadingConnector does in each step; each number that is read is brought up to date.
        "a KV connector that reads all requests": type(scheduler.connector).__module__.startswith("vllm."),
        "an encoder cache connector": scheduler.ec_connector is not None,
        "KV events": scheduler.enable_kv_cache_events,
        "metrics of cache blocks": scheduler.kv_metrics_collector is not None,
        "metrics of model FLOPs": scheduler.perf_metrics is not None,
        "speculative decoding": config.speculative_config is not None or scheduler.num_lookahead_tokens > 0,
        "an encoder-decoder model": scheduler.is_encoder_decoder,
        "pipeline stages": scheduler.use_pp,
        "context parallelism": scheduler.dcp_world_size * scheduler.pcp_world_size > 1,
        "a cache manager of its own": type(manager) is not KVCacheManager
        or type(manager.coordinator)
        not in (HybridKVCacheCoordinator, UnitaryKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache),
        "layers of other kinds than full attention and sliding windows": kinds
        - {FullAttentionManager, SlidingWindowManager, StateManager},
        "a model without attention": not attention,
        # A state of recurrent layers never grows, unless it is kept for prefixes.
        "prefixes of recurrent layers": StateManager in kinds and type(manager.coordinator) is HybridKVCacheCoordinator,
        "recurrent layers in a model with several groups of attention": StateManager in kinds and len(attention) != 1,
        "a KV connector in a model with sliding windows": scheduler.connector is not None
        and (len(attention) > 1 or SlidingWindowManager in kinds),
        "a method of its own": _has_own_hooks(type(scheduler), mixin),
    } | unserved_features(scheduler, is_ours=StateManager in kinds)
    for reason, holds in reasons.items():
        if holds:
            return reason
    if any(each.block_size != scheduler.block_size for each in attention):
        return "blocks that are hashed in parts"
    return None


def _has_own_hooks(scheduler_cls: type, mixin: type) -> bool:
    """Whether a class other than vLLM's changes a method that rows replace: below the mixin, or above if private."""
    order = scheduler_cls.__mro__
    at = order.index(mixin)
    others = [cls for cls in order[at + 1 :] if cls not in (AsyncScheduler, *mixin.__mro__)]
    private = [name for name in HOOKS if name.startswith("_")]
    return any(name in vars(cls) for cls in others for name in HOOKS) or any(
        name in vars(cls) for cls in order[:at] for name in private
    )
