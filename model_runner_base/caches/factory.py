"""List of the kinds of caches; the kinds of a model, and the layout that all of them read."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.built_states import BuiltStateCaches
from model_runner_base.caches.chosen import ChosenCaches
from model_runner_base.caches.contiguous import ContiguousDecode
from model_runner_base.caches.cross import CrossCaches
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.caches.spans import BidirectionalSpans
from model_runner_base.caches.states import StateCaches
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.request_layout import RequestLayout
from model_runner_base.step.sizes import StepLimits
from model_runner_base.step.token_layout import RowsAndTiles, TokenLayout

KINDS: tuple[type[CacheKind], ...] = (
    ScratchCaches,
    PagedCaches,
    ChosenCaches,
    ContiguousDecode,
    CrossCaches,
    BuilderCaches,
    StateCaches,
    BuiltStateCaches,
)
"""Kinds of caches, in the order in which a step asks those that a model has."""


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
