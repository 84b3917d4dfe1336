"""Checkpoints of OLMo Hybrid, whose convolutions vLLM 0.33 cannot load, and some of whose norms it does not know.

Weights of three convolutions go to one tensor, and vLLM writes on each weight which part of it that is. The tensor's
loader asks for the part as an argument, which vLLM does not pass (vLLM's pull request 55858). Transformers writes two
norms of a layer under other names than the published checkpoint has.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper

from model_runner_base.vllm_compat.patches.wrap_once import MARK

ARCHITECTURE = "OlmoHybridForCausalLM"
LAYERS = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn"
MODEL = "vllm.model_executor.models.olmo_hybrid"
NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
"""Names of norms as transformers writes them, and in vLLM's model."""


def load_olmo_hybrid(vllm_config: VllmConfig) -> None:
    """Has vLLM make and load OLMo Hybrid; does nothing for other models."""
    if vllm_config.model_config.architecture != ARCHITECTURE:
        return
    layers: Any = import_module(LAYERS)
    make = layers._make_fused_conv1d_weight_loader
    if hasattr(make, MARK):
        return

    @wraps(make)
    def make_reading(*args: Any) -> Callable[..., None]:
        load = make(*args)

        def load_part(param: torch.Tensor, weight: torch.Tensor, part: int | None = None) -> None:
            load(param, weight, getattr(weight, "shard_id", None) if part is None else part)

        return load_part

    setattr(make_reading, MARK, True)
    layers._make_fused_conv1d_weight_loader = make_reading
    layers.set_triton_allocator = lambda device: None  # For memory of kernels, which are not run.
    model: Any = import_module(MODEL).OlmoHybridModel
    model.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr=NORMS)
