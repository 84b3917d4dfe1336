"""Which kind a model's KV-cache groups are: chosen once, from their specs and backends."""

from vllm.config import VllmConfig

from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.cross import CrossCaches
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.lines import LineCaches
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.caches.spans import NO_SPANS, Spans
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.sizes import StepLimits


def make_caches(
    groups: list[AttentionGroup],
    limits: StepLimits,
    spans: Spans,
    vllm_config: VllmConfig,
    device_ops: DeviceOps,
) -> CacheKind:
    """Groups are paged where the platform chose the base's attention, else their backend's builders see to them.

    Layers without a cache of their own have groups that see requests whole; allocation.py lets no other backend by.
    """
    is_planned = all(issubclass(group.backend, PagedAttentionBackend) for group in groups)
    is_whole = any(group.sight.is_whole for group in groups)
    if spans is not NO_SPANS and (is_whole or not is_planned):
        raise UnsupportedConfigError("tokens of an image see each other, which the base's own attention alone has")
    if limits.cross_len:
        if not is_planned or spans is not NO_SPANS:
            raise UnsupportedConfigError("cross-attention needs the base's own attention, and tokens that see causally")
        return CrossCaches(groups, limits)
    if is_whole:
        return ScratchCaches(groups, limits)
    if is_planned:
        return (LineCaches if limits.num_lines else PagedCaches)(groups, limits, spans)
    return BuilderCaches(groups, limits, vllm_config, device_ops)
