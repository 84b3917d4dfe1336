"""Runs a model's encoder on the items that the scheduler names, and keeps the outputs on the device.

An item is an image, a video or a sound. A tower is the part of the model that encodes a kind of item. On devices that
support it, some towers run as graphs (``towers/encoder_graphs.py``). All others run eagerly on
``DeviceOps.eager_device``. So any of vLLM's towers works, and nothing is compiled for the size of an image. Outputs
become rows of one pool on the device, from which the graphs of mixed steps gather them. Towers of a family that was not
tried are checked while an engine starts, and not by its first request.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.platforms import current_platform

from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.spans import NO_SPANS, BidirectionalSpans
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.inputs.multimodal.inputs import MultiModalInputs, RotaryInputs
from model_runner_base.inputs.multimodal.layer_inputs import DeepstackBuffers, PerLayerEmbeddings
from model_runner_base.inputs.multimodal.positions import ItemSpans, calc_mrope_positions, calc_xdrope_positions
from model_runner_base.inputs.multimodal.towers.encoder_graphs import (
    EAGER,
    EncoderGraphs,
    PatchGraphs,
    TileGraphs,
    check_num_embeds,
)
from model_runner_base.inputs.multimodal.towers.patches import PATCH_TOWERS
from model_runner_base.inputs.multimodal.towers.tiles import tiled_tower
from model_runner_base.inputs.pool import EmbeddingPool, PoolRows
from model_runner_base.models.tower_placement import towers_of
from model_runner_base.step.components import PromptsInChunks, StepComponent
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.schedule import Schedule
from model_runner_base.vllm_compat.patches.items import memory_of_host
from model_runner_base.vllm_compat.probes.config import rotary_dims
from model_runner_base.vllm_compat.probes.multimodal import group_by_modality, largest_items, sees_in_windows
from model_runner_base.vllm_compat.types.speculation import max_step_tokens


class LayerCaches(NamedTuple):
    """Caches of all layers of a model."""

    groups: Sequence[AttentionGroup]
    kv_caches: MutableSequence[torch.Tensor]
    index_of: Mapping[str, Sequence[int]]
    """Indices of each layer's caches in ``kv_caches``."""


class Encoder(StepComponent):
    """Encoder interface; this default encodes nothing."""

    def connect(self, requests: RequestStates, caches: LayerCaches) -> None:
        """Called when the layers' caches are made, because caches of cross-attention hold encoder outputs."""

    def give_up(self, identifiers: Iterable[str]) -> None:
        """Forgets the outputs of the items with these identifiers."""

    def put_off(self, identifiers: Iterable[str]) -> None:
        """Marks items to be encoded later, when a request reads them."""

    def check_reload(self) -> None:
        """Raises CheckpointError if the encoder cannot follow a reload of the model's weights."""

    def follow_reload(self) -> None:
        """Encodes anew, before a request reads it, every item that was encoded with other weights."""

    def step_memory(self) -> int:
        """Bytes of device memory that a step may need for encoder outputs, in addition to what the model needs.

        The memory that eager towers need is not counted.
        """
        return 0

    def profile(self) -> None:
        """Runs the encoding that needs the most device memory, for a device that measures its peak memory."""

    def reset(self) -> None:
        """Forgets all outputs."""

    def components(self, requests: RequestStates) -> list[StepComponent]:
        """Components of the step: the encoder, and those that give the model its outputs."""
        return [self]

    def spans(self, requests: RequestStates) -> BidirectionalSpans:
        """Spans of prompt tokens that see each other in both directions, such as those of an image."""
        return NO_SPANS


NO_ENCODER = Encoder()


class ItemPlaces(Encoder):
    """Positions of the items in prompts, and of the tokens around them.

    A pipeline's later stages have this alone, since they get hidden states that were made of the items.
    """

    def __init__(self, model_config: ModelConfig, model: Any) -> None:
        self._model_config = model_config
        self._model = model
        self._num_dims = rotary_dims(model_config)
        self._sees_both_ways = model_config.is_mm_prefix_lm

    def components(self, requests: RequestStates) -> list[StepComponent]:
        return [PromptsInChunks(), *self._rotary(requests)]

    def spans(self, requests: RequestStates) -> BidirectionalSpans:
        if not self._sees_both_ways:
            return NO_SPANS
        return ItemSpans(requests, in_windows=sees_in_windows(self._model))

    def _rotary(self, requests: RequestStates) -> list[StepComponent]:
        return [RotaryInputs(requests, self._num_dims, self._calc_positions)] if self._num_dims > 1 else []

    def _calc_positions(self, info: RequestInfo) -> tuple[np.ndarray, int]:
        if self._model_config.uses_mrope:
            return calc_mrope_positions(self._model, info.prompt_token_ids, info.items)
        return calc_xdrope_positions(self._model, self._num_dims, len(info.prompt_token_ids), info.items)


class ItemEncoder(ItemPlaces):
    """The encoder of a multimodal model."""

    def __init__(self, vllm_config: VllmConfig, model: Any, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        super().__init__(vllm_config.model_config, model)
        self._budget = budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY)
        model_config = vllm_config.model_config
        size = budget.encoder_cache_size
        self._levels = DeepstackBuffers(model, model_config, max_step_tokens(vllm_config), device_ops)
        self._per_layer = PerLayerEmbeddings(model, max_step_tokens(vllm_config), device_ops)
        width = (1 + self._levels.count) * model_config.get_inputs_embeds_size()
        self._device = device_ops.eager_device
        self._pool_rows = PoolRows(size)
        self._to_encode_again = set[str]()
        """Identifiers of items that the scheduler takes for encoded, but that have no rows, or rows of other
        weights."""
        assert isinstance(model_config.dtype, torch.dtype)
        self._pool = EmbeddingPool(size, width, model_config.dtype, size, wrap, device_ops)
        self._graphs = EAGER
        if budget.mm_max_toks_per_item and device_ops.towers_as_graphs:
            self._graphs = make_graphs(model_config, model, self._pool, self._pool_rows, wrap, device_ops)
        self._max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens

    def give_up(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            self._pool_rows.give_up(identifier)
            self._to_encode_again.discard(identifier)

    def put_off(self, identifiers: Iterable[str]) -> None:
        self._to_encode_again.update(identifiers)

    def step_memory(self) -> int:
        """Bytes of the largest piece that is copied to the pool, of the rows that a step gathers, and of graphs.

        The gathered rows, one for each token of a step, count three times: they are copied in parts.
        """
        (pool,) = self._pool.tensors
        num_embeds = self._pool.longest_piece + 3 * self._max_num_tokens
        return pool[0].nbytes * num_embeds + self._graphs.step_memory()

    def connect(self, requests: RequestStates, caches: LayerCaches) -> None:
        self._requests = requests

    def begin_step(self, schedule: Schedule) -> None:
        """Encodes what the scheduler asks for, after it has freed what the scheduler may have given to others."""
        if schedule.freed_items:
            self.give_up(schedule.freed_items)
        if schedule.encoder_inputs or schedule.failed_items or self._to_encode_again:
            self._run(schedule, self._requests.infos)

    def _run(self, schedule: Schedule, infos: Mapping[str, RequestInfo]) -> None:
        items = [infos[req_id].items[index] for req_id, indices in schedule.encoder_inputs.items() for index in indices]
        again = [*self._items_to_encode_again(schedule, infos)] if self._to_encode_again else []
        if again:
            self.give_up(item.identifier for item in again)
        asked = {item.identifier: item for item in (*items, *schedule.failed_items, *again)}.values()
        missing = [item for item in asked if item.identifier not in self._pool_rows and item.data is not None]
        if missing:
            self._encode(missing)

    def _items_to_encode_again(
        self, schedule: Schedule, infos: Mapping[str, RequestInfo]
    ) -> Iterator[MultiModalFeatureSpec]:
        """Yields the items that the step's tokens, or a drafter one token further, read as other weights made them."""
        starts = dict(zip(schedule.continued, schedule.num_computed, strict=True))
        starts |= {arrival.req_id: arrival.num_computed for arrival in schedule.arrivals}
        for req_id, count in schedule.num_tokens.items():
            start = starts[req_id]
            for item in infos[req_id].items:
                place = item.mm_position
                is_read = place.offset <= start + count and place.offset + place.length > start
                if is_read and item.identifier in self._to_encode_again and item.data is not None:
                    yield item

    def check_reload(self) -> None:
        if self._graphs is not EAGER:
            raise CheckpointError(
                f"the towers of {self._model_config.architecture} run as graphs on this device, with copies of their "
                "weights: weights cannot be loaded again yet, start another engine; nothing was changed"
            )

    def follow_reload(self) -> None:
        self._to_encode_again.update(self._pool_rows)

    @torch.no_grad()
    def _encode(self, items: Sequence[MultiModalFeatureSpec]) -> None:
        """Encodes items: in graphs if they can, eagerly otherwise."""
        items = self._graphs.encode(items)
        outputs = self._run_eagerly([(item.modality, item.data) for item in items])
        for item, output in zip(items, outputs, strict=True):
            embeds = output.flatten(0, -2)  # Some models keep a dimension of 1 if videos differ in length.
            check_num_embeds(item, len(embeds))
            self._pool.write(self._pool_rows.take(item.identifier, len(embeds)), embeds)

    def _run_eagerly(self, contents: Sequence[tuple[str, Any]]) -> list[torch.Tensor]:
        """Outputs of the towers for items; each item is given as its modality and its data."""
        is_pinned = current_platform.is_pin_memory_available()  # Unpinned copies would wait for earlier steps.
        groups: Any = group_by_modality(contents, device=self._device, pin_memory=is_pinned)
        with memory_of_host():
            return [output for _, _, kwargs in groups for output in self._model.embed_multimodal(**kwargs)]

    @torch.no_grad()
    def profile(self) -> None:
        """Encodes as many of the largest items as one step may ask for, unless ``skip_mm_profiling`` is set."""
        mm_config = self._model_config.multimodal_config
        if self._budget.mm_max_toks_per_item and not (mm_config and mm_config.skip_mm_profiling):
            self._run_eagerly(largest_items(self._budget, self._model_config))

    @torch.no_grad()
    def try_out(self) -> None:
        """Encodes one of the largest items, so that towers that do not run here raise an error when the engine starts.

        ``admission/multimodal_limits.py`` refuses ``skip_mm_profiling`` for the families that this is for.
        """
        if self._budget.mm_max_toks_per_item:
            outputs = self._run_eagerly(largest_items(self._budget, self._model_config)[:1])
            check_outputs(self._model, outputs, self._pool.tensors[0].shape[1])

    def warm_up(self) -> None:
        self._pool.warm_up()
        with torch.no_grad():
            self._graphs.warm_up()

    def reset(self) -> None:
        self._pool_rows.clear()
        self._to_encode_again.clear()

    def components(self, requests: RequestStates) -> list[StepComponent]:
        layer_inputs = (self._levels, self._per_layer)
        inputs = MultiModalInputs(requests, self._pool.tensors, self._pool_rows, *layer_inputs, self._model)
        return [self, inputs, *self._rotary(requests)]


def make_graphs(
    model_config: ModelConfig,
    model: Any,
    pool: EmbeddingPool,
    pool_rows: PoolRows,
    wrap: WrapFunction,
    device_ops: DeviceOps,
) -> EncoderGraphs:
    """Makes graphs of a model's towers, whose modules are on the host; ``EAGER`` if no tower can be a graph."""
    if tiled := tiled_tower(model_config):
        return TileGraphs(tiled, model, pool, pool_rows, wrap, device_ops)
    if patches := PATCH_TOWERS.get(model_config.architecture):
        return PatchGraphs(patches(model.visual), pool, pool_rows, wrap, device_ops)
    return EAGER


def check_tower_layers(vllm_config: VllmConfig, model: Any) -> None:
    """Raises UnsupportedConfigError if a tower has layers that need a step's attention metadata.

    Without it vLLM's attention layers return zeros.
    """
    if not towers_of(model):
        raise UnsupportedConfigError(
            f"{type(model).__name__} is not supported yet, since vLLM's class does not say which of its modules are "
            "towers: use its text alone"
        )
    needing = {id(layer) for layer in vllm_config.compilation_config.static_forward_context.values()}
    for tower in towers_of(model):
        for name, module in tower.named_modules():
            if id(module) in needing:
                raise UnsupportedConfigError(
                    f"{type(model).__name__} is not supported yet, since layer {name} of its {type(tower).__name__} "
                    "needs the attention metadata of a step: use its text alone"
                )


def check_outputs(model: Any, outputs: Sequence[torch.Tensor], width: int) -> None:
    """Raises UnsupportedConfigError unless a tower's outputs, of an item each, have rows of ``width`` numbers."""
    for output in outputs:
        if output.shape[-1] != width:
            raise UnsupportedConfigError(
                f"{type(model).__name__} is not supported yet, since its towers make rows of {output.shape[-1]} "
                f"numbers, and its text model takes {width}: use its text alone"
            )
