"""States of recurrent layers that call vLLM's kernels: a request's entry is a block of vLLM's metadata builders.

vLLM's kernels of decode rows read a request's state whatever its position is. So the state of a request whose first
step has one token is cleared before that step; kernels of chunks are told which requests have none.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder

from model_runner_base.caches.builders import BuilderCaches, StepRequests
from model_runner_base.caches.group import AttentionGroup, ModelCaches, OwnTensors
from model_runner_base.caches.states import check_compatible, plain_layers, states_table, tensors_of
from model_runner_base.device_ops import DeviceOps
from model_runner_base.models.recurrent.layers import states_of
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import BlockTable, DeviceRows
from model_runner_base.step.sizes import StepLimits
from model_runner_base.step.trace import LayerTrace
from model_runner_base.vllm_compat.types.attention_metadata import call_all_decodes
from model_runner_base.vllm_compat.types.recurrent import choose_kernels, kernel_spec, recurrent_layers


def _kernel_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Recurrent layers by name, unless all run in plain torch."""
    return {} if plain_layers(vllm_config) else recurrent_layers(vllm_config)


class BuiltStateCaches(BuilderCaches):
    """States of all recurrent layers; a request has the same index in each.

    Args:
        table: one entry a row, the request's index.
        layers: vLLM's recurrent layers by name.
    """

    def __init__(
        self,
        table: BlockTable,
        layers: Mapping[str, Any],
        limits: StepLimits,
        vllm_config: VllmConfig,
        device_ops: DeviceOps,
    ) -> None:
        specs = {name: kernel_spec(layer, limits.max_model_len) for name, layer in layers.items()}
        alike: dict[Any, list[str]] = {}
        for name, layer in layers.items():
            alike.setdefault((layer.get_attn_backend(), specs[name]), []).append(name)
        size = table.block_size
        groups = [
            AttentionGroup(names, table, size, size, backend=backend, spec=spec)
            for (backend, spec), names in alike.items()
        ]
        super().__init__(groups, limits, vllm_config, device_ops)
        choose_kernels(vllm_config, specs)
        self._table, self._layers = table, list(layers.values())
        self.tables = [table]

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        layers = _kernel_layers(model.vllm_config)
        check_compatible(model, layers, is_planned=False)
        return cls(states_table(model), layers, model.limits, model.vllm_config, model.device_ops) if layers else None

    @classmethod
    def own_tensors(cls, vllm_config: VllmConfig, kv_tile_target: int) -> list[OwnTensors]:
        return tensors_of(_kernel_layers(vllm_config), vllm_config)

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        if batch is not None:
            self._clear(self._table.table[batch.rows[(batch.num_computed == 0) & (batch.query_len == 1)], 0])
        super().prepare(batch, step, rows)

    def _clear(self, indices: np.ndarray) -> None:
        """Clears the states at ``indices`` of all layers."""
        if len(indices):
            on_device = self._device_ops.to_device(indices.astype(np.int64))
            for layer in self._layers:
                for state in states_of(layer):
                    state.index_fill_(0, on_device, 0)

    def _set_slot_mapping(self, call: ModelCall) -> None:
        """Does nothing: states have no slots of tokens."""

    def _common_metadata(self, requests: StepRequests, index: int) -> Any:
        return call_all_decodes(super()._common_metadata(requests, index))

    def _built(self, builder: AttentionMetadataBuilder, common: Any) -> Any:
        """Metadata of one group, made alike for a capture: for that, builders take no step that is not captured."""
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
