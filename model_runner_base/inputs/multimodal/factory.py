"""Chooses the encoder of a loaded model."""

from typing import Any

from vllm.config import VllmConfig

from model_runner_base.admission.multimodal_limits import MULTIMODAL_ARCHITECTURES
from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.pipeline_stages import is_first_stage
from model_runner_base.inputs.multimodal.cross import CrossEncoder
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER, Encoder, ItemEncoder, ItemPlaces, check_tower_layers
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.vllm_compat.patches.items import keep_item_data
from model_runner_base.vllm_compat.probes.multimodal import takes_items, tried


def choose_encoder(vllm_config: VllmConfig, model: Any, wrap: WrapFunction, device_ops: DeviceOps) -> Encoder:
    """Makes the encoder of the loaded ``model``; one that does nothing if requests have text alone."""
    config = vllm_config.model_config
    if not takes_items(config):
        return NO_ENCODER
    keep_item_data()  # In an engine core that was spawned, the platform has not checked the config and called this.
    if config.is_encoder_decoder:
        return CrossEncoder(vllm_config, model, wrap, device_ops)
    if not is_first_stage(vllm_config):
        return ItemPlaces(config, model)
    encoder = ItemEncoder(vllm_config, model, wrap, device_ops)
    if config.architecture not in tried(MULTIMODAL_ARCHITECTURES):
        check_tower_layers(vllm_config, model)
        encoder.try_out()
    return encoder
