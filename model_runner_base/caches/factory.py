"""Caches of a model: the specs that vLLM plans them by, their kinds, and the layout that all kinds read."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.built_states import BuiltStateCaches
from model_runner_base.caches.compressed import CompressedCaches
from model_runner_base.caches.contiguous import ContiguousDecode
from model_runner_base.caches.cross import CrossCaches
from model_runner_base.caches.decode_context import ContextCaches
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import ChosenCaches, PagedCaches
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.caches.spans import BidirectionalSpans
from model_runner_base.caches.states import StateCaches
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.request_layout import RequestLayout
from model_runner_base.step.sizes import StepLimits
from model_runner_base.step.token_layout import RowsAndTiles, TokenLayout
from model_runner_base.vllm_compat.types.kv_cache import (
    KVCacheSpec,
    attention_layers,
    is_of_attention,
    keeps_window_blocks,
    sees_whole_context,
    shared_caches,
)
from model_runner_base.vllm_compat.types.speculation import read_speculation

KINDS: tuple[type[CacheKind], ...] = (
    ScratchCaches,
    PagedCaches,
    ContextCaches,
    ChosenCaches,
    CompressedCaches,
    ContiguousDecode,
    CrossCaches,
    BuilderCaches,
    StateCaches,
    BuiltStateCaches,
)
"""Kinds of caches, in the order in which a step asks those that a model has."""


def collect_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Collects the KV-cache spec of every layer that keeps a cache, by layer name.

    Raises UnsupportedConfigError for a layer whose cache is not one of attention, or that has a window while drafts are
    verified under an asynchronous scheduler that would free its blocks too early.
    """
    specs: dict[str, KVCacheSpec] = {}
    sharing = shared_caches(vllm_config)
    for name, layer in attention_layers(vllm_config).items():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None or name in sharing:
            continue
        if not is_of_attention(spec):
            raise UnsupportedConfigError(
                f"layer {name} keeps a {type(spec).__name__}; such layers are not supported yet"
            )
        forgets = read_speculation(vllm_config).unread and not sees_whole_context(spec)
        if forgets and not keeps_window_blocks(vllm_config):
            raise UnsupportedConfigError(
                f"layer {name} forgets keys before its window, and this scheduler would free their blocks before "
                "drafts are verified: leave out scheduler_cls, or set async_scheduling=False"
            )
        specs[name] = spec
    return specs


def make_caches(
    groups: list[AttentionGroup],
    limits: StepLimits,
    spans: BidirectionalSpans,
    vllm_config: VllmConfig,
    device_ops: DeviceOps,
) -> list[CacheKind]:
    """Makes the kinds of caches of a model, each for the layers that it serves.

    Raises UnsupportedConfigError for layers that cannot be in one model.
    """
    model = ModelCaches(groups, limits, spans, vllm_config, device_ops)
    made = [kind.make(model) for kind in KINDS]
    return [kind for kind in made if kind is not None]


def make_layout(kinds: Sequence[CacheKind], limits: StepLimits) -> TokenLayout:
    """Makes the layout that all of the kinds read."""
    if all(kind.is_planned for kind in kinds):
        return RowsAndTiles(limits, kinds)
    thresholds = [kind.threshold for kind in kinds if kind.threshold is not None]
    return RequestLayout(limits, min(thresholds, default=None))
