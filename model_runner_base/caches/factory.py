"""Factory of the kinds of a model's KV-cache groups and of their layout, chosen by the groups' specs and backends."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from model_runner_base.caches.builders import BuilderCaches
from model_runner_base.caches.built_states import BuiltStateCaches
from model_runner_base.caches.contiguous import ContiguousDecode
from model_runner_base.caches.cross import CrossCaches
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.caches.spans import NO_SPANS, BidirectionalSpans
from model_runner_base.caches.states import StateCaches
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.recurrent.layers import is_plain
from model_runner_base.step.block_tables import BlockTable
from model_runner_base.step.request_layout import RequestLayout
from model_runner_base.step.rows_and_tiles import RowsAndTiles
from model_runner_base.step.sizes import StepLimits
from model_runner_base.step.token_layout import TokenLayout
from model_runner_base.vllm_compat.types.recurrent import has_states, keeps_prefixes, recurrent_layers


def make_caches(
    groups: list[AttentionGroup],
    limits: StepLimits,
    spans: BidirectionalSpans,
    vllm_config: VllmConfig,
    device_ops: DeviceOps,
) -> list[CacheKind]:
    """Puts every group into the kind that fits what its layers keep and read.

    The base plans the attention of a backend that reads plans; other backends have metadata builders. Raises
    UnsupportedConfigError for groups that cannot be in one model.
    """
    planned = [group for group in groups if group.reads_plans]
    whole = [group for group in planned if group.key_range.is_whole]
    cross = [group for group in planned if group.cross_len]
    paged = [group for group in planned if not group.key_range.is_whole and not group.cross_len]
    built = [group for group in groups if not group.reads_plans]
    if spans is not NO_SPANS and (whole or built):
        raise UnsupportedConfigError("tokens of an image see each other, which only the base's own attention supports")
    if limits.cross_len and (built or spans is not NO_SPANS):
        raise UnsupportedConfigError("cross-attention needs the base's own attention, and causal self-attention")
    if planned and built:
        names = sorted({group.backend.get_name() for group in built})
        raise UnsupportedConfigError(
            f"layers with attention backend {', '.join(names)} cannot be mixed with the base's own attention: "
            "choose one backend for all layers"
        )
    kinds = list[CacheKind]()
    if whole:
        kinds.append(ScratchCaches(whole, limits))
    if paged:
        kinds.append(PagedCaches(paged, limits, spans))
    if paged and limits.num_lines:
        kinds.append(ContiguousDecode(paged, limits))
    if cross:
        kinds.append(CrossCaches(cross, limits))
    if built:
        kinds.append(BuilderCaches(built, limits, vllm_config, device_ops))
    return kinds


def make_state_caches(
    vllm_config: VllmConfig, limits: StepLimits, kinds: Sequence[CacheKind], device_ops: DeviceOps
) -> tuple[BlockTable, CacheKind] | None:
    """The states of a model's recurrent layers, and the table of which request has which; None if it has no such layer.

    The scheduler's last group is theirs. Raises UnsupportedConfigError unless the base plans all layers, ``kinds`` of
    the others and recurrent ones, or vLLM's metadata builders do.
    """
    layers = recurrent_layers(vllm_config)
    if not has_states(vllm_config):
        if layers:
            raise UnsupportedConfigError(f"layer {next(iter(layers))} keeps a state, but the model is not a hybrid one")
        return None
    has_kernels = not all(map(is_plain, layers.values()))
    if any(isinstance(kind, BuilderCaches) != has_kernels for kind in kinds):
        raise UnsupportedConfigError(
            "recurrent layers with vLLM's kernels need vLLM's attention in all other layers, and those in plain torch "
            "the base's own: choose one for all layers"
        )
    block_size = vllm_config.cache_config.block_size if keeps_prefixes(vllm_config) else limits.max_model_len
    table = BlockTable(limits.max_num_reqs, limits.max_model_len, block_size, 1)
    if has_kernels:
        return table, BuiltStateCaches(table, layers, limits, vllm_config, device_ops)
    return table, StateCaches(table, list(layers), limits)


def make_layout(kinds: Sequence[CacheKind], limits: StepLimits) -> TokenLayout:
    """The layout that all of the kinds read."""
    built = [kind for kind in kinds if isinstance(kind, BuilderCaches)]
    if not built:
        return RowsAndTiles(limits, kinds)
    thresholds = [kind.threshold for kind in built if kind.threshold is not None]
    return RequestLayout(limits, min(thresholds, default=None))
