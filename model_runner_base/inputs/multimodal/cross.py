"""The encoder of an encoder-decoder model, whose output becomes keys and values of the cross-attention layers.

The scheduler names a request's item in its first step, and again when it resumes after a preemption. Then the encoder
runs eagerly. One graph projects its output with each layer's own weights and writes the request's cross-attention
blocks. Later steps give the layers nothing more: they attend to those blocks (caches/cross.py).
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from model_runner_base.caches.group import AttentionGroup
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import CheckpointError
from model_runner_base.inputs.multimodal.encoder import Encoder, LayerCaches
from model_runner_base.step.call import ModelCall
from model_runner_base.step.graph_policy import StepFunction, WrapFunction
from model_runner_base.step.request_states import BlockTable, RequestStates
from model_runner_base.step.schedule import Schedule
from model_runner_base.vllm_compat.probes.multimodal import group_by_modality
from model_runner_base.vllm_compat.types.kv_cache import cross_length


class CrossEncoder(Encoder):
    """Encoder for one item a request, of one modality, with outputs of one length for all requests."""

    def __init__(self, vllm_config: VllmConfig, model: Any, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        config = vllm_config.model_config
        self._model = model
        self._wrap = wrap
        self._device_ops = device_ops
        assert isinstance(config.dtype, torch.dtype)
        self._shape, self._dtype = (cross_length(vllm_config), config.get_hidden_size()), config.dtype
        self._num_layers = sum(hasattr(module, "kv_proj") for module in model.modules())
        self._requests: RequestStates
        self._outputs: list[OutputCaches]

    def connect(self, requests: RequestStates, caches: LayerCaches) -> None:
        self._requests = requests
        self._outputs = [
            OutputCaches(group, self._model, caches, self._wrap, self._device_ops)
            for group in caches.groups
            if group.cross_len
        ]

    def bind(self, call: ModelCall) -> None:
        call.kwargs["encoder_outputs"] = []  # The outputs are in the cache already.

    def step_memory(self) -> int:
        """Bytes of one output, and of its keys and values in all layers, which one graph writes."""
        length, width = self._shape
        return (1 + 2 * self._num_layers) * length * width * self._dtype.itemsize

    @torch.no_grad()
    def begin_step(self, schedule: Schedule) -> None:
        if not schedule.encoder_inputs:
            return
        infos = self._requests.infos
        req_ids = [req_id for req_id, indices in schedule.encoder_inputs.items() for _ in indices]
        items = [infos[req_id].items[index] for req_id, indices in schedule.encoder_inputs.items() for index in indices]
        contents = [(item.modality, item.data) for item in items]
        outputs: list[torch.Tensor] = []
        groups: Any = group_by_modality(contents, device=self._device_ops.eager_device)
        for _, _, kwargs in groups:
            outputs += self._model.embed_multimodal(**kwargs)
        for req_id, output in zip(req_ids, outputs, strict=True):
            if output.shape != self._shape:
                raise RuntimeError(f"the encoder of {req_id} made {[*output.shape]} numbers, not {[*self._shape]}")
            on_device = self._device_ops.upload(output.contiguous())
            for caches in self._outputs:
                caches.write(on_device, self._requests.rows[req_id])

    def check_reload(self) -> None:
        raise CheckpointError(
            "weights of an encoder with a decoder cannot be loaded again yet: start another engine; nothing was changed"
        )

    def warm_up(self) -> None:
        """Writes an output of zeros to the null block."""
        output = self._device_ops.upload(torch.zeros(self._shape, dtype=self._dtype))
        for caches in self._outputs:
            caches.write(output, None)


class OutputCaches:
    """Writes encoder outputs to the caches of a group of cross-attention layers."""

    def __init__(
        self,
        group: AttentionGroup,
        model: Any,
        caches: LayerCaches,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        layers = {getattr(getattr(each, "attn", None), "layer_name", None): each for each in model.modules()}
        self._layers = [layers[name] for name in group.layer_names]
        """Parent modules of the attention layers, which have the projections."""
        self._index_of = [caches.index_of[name][0] for name in group.layer_names]
        self._kv_caches = caches.kv_caches
        self._table: BlockTable = group.block_table
        self._num_blocks = -(-group.cross_len // self._table.block_size)
        self._to_device = device_ops.to_device
        self._write: StepFunction = wrap(self._project, caches.kv_caches)

    def write(self, output: torch.Tensor, row: int | None) -> None:
        """Writes ``output`` [N, H], on the device, to the blocks of a request's row; None: to the null block."""
        blocks = np.zeros(self._num_blocks, np.int32) if row is None else self._table.table[row, : self._num_blocks]
        self._write(output, self._to_device(blocks), *[self._kv_caches[index] for index in self._index_of])

    def _project(self, output: torch.Tensor, blocks: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        """Writes each layer's keys and values of ``output`` [N, H] to ``blocks`` [B] of its cache, and returns them."""
        block_size, count = self._table.block_size, output.shape[0]
        offsets = torch.arange(block_size, dtype=torch.int32, device=blocks.device)
        slot_blocks = blocks.unsqueeze(1).expand(-1, block_size).reshape(-1)[:count]
        slot_offsets = offsets.unsqueeze(0).expand(self._num_blocks, -1).reshape(-1)[:count]
        for layer, cache in zip(self._layers, caches, strict=True):
            projected, _ = layer.kv_proj(output)
            key, value = projected.view(count, 2, -1).unbind(1)
            layer.attn.impl.cache_format.write(cache, slot_blocks, slot_offsets, key, value)
        return blocks.clone()
