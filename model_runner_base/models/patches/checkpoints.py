"""Checkpoints with tensors that vLLM's loaders look for elsewhere, or leave out."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

DBRX = "DbrxForCausalLM"
DBRX_MODULE = "vllm.model_executor.models.dbrx"
WRITTEN, MEANT = ".ffn.experts.mlp.", ".ffn.experts.routed_experts.mlp."

Weights = Iterable[tuple[str, torch.Tensor]]


def load_dbrx(vllm_config: VllmConfig) -> None:
    """Has vLLM load DBRX; does nothing for other models, and where experts have the names of the checkpoint.

    vLLM 0.33 looks for its experts under the names that they had in earlier releases.
    """
    if vllm_config.model_config.architecture != DBRX:
        return
    models: Any = import_module(DBRX_MODULE)
    if hasattr(models, "RoutedExperts"):
        wrap_once(models.DbrxModel, "load_weights", _with_experts_names)


def _with_experts_names(load: Callable[[Any, Weights], set[str]]) -> Callable[[Any, Weights], set[str]]:
    @wraps(load)
    def load_weights(self: Any, weights: Weights) -> set[str]:
        return load(self, ((name.replace(WRITTEN, MEANT), weight) for name, weight in weights))

    return load_weights


OLMO_HYBRID = "OlmoHybridForCausalLM"
READS_PARTS = "_reads_parts_of_convolutions"
OLMO_LAYERS = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn"
OLMO_MODEL = "vllm.model_executor.models.olmo_hybrid"
NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
"""Names of norms as transformers writes them, and in vLLM's model."""


def load_olmo_hybrid(vllm_config: VllmConfig) -> None:
    """Has vLLM make and load OLMo Hybrid; does nothing for other models.

    vLLM 0.33 cannot load its convolutions, and does not know some of its norms.

    Weights of three convolutions go to one tensor, and vLLM writes on each weight which part of it that is. The
    tensor's loader asks for the part as an argument, which vLLM does not pass (vLLM's pull request 55858). Transformers
    writes two norms of a layer under other names than the published checkpoint has.
    """
    if vllm_config.model_config.architecture != OLMO_HYBRID:
        return
    layers: Any = import_module(OLMO_LAYERS)
    make = layers._make_fused_conv1d_weight_loader
    if hasattr(make, READS_PARTS):
        return

    @wraps(make)
    def make_reading(*args: Any) -> Callable[..., None]:
        load = make(*args)

        def load_part(param: torch.Tensor, weight: torch.Tensor, part: int | None = None) -> None:
            load(param, weight, getattr(weight, "shard_id", None) if part is None else part)

        return load_part

    setattr(make_reading, READS_PARTS, True)
    layers._make_fused_conv1d_weight_loader = make_reading
    layers.set_triton_allocator = lambda device: None  # For memory of kernels, which are not run.
    model: Any = import_module(OLMO_MODEL).OlmoHybridModel
    model.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr=NORMS)


BIAS = "e_score_correction_bias"

Load = Callable[[Any, Weights], Iterable[str]]


def load_router_biases() -> None:
    """Has vLLM load the biases of routers that a checkpoint stores with its experts, as Laguna's does.

    An expert's bias is added to its score before the best are chosen. vLLM's loader of experts leaves these biases out.
    Does nothing in releases whose experts do not load their own weights.
    """
    if experts := getattr(fused_moe, "RoutedExperts", None):
        wrap_once(experts, "load_weights", _with_bias)


def _with_bias(load: Load) -> Load:
    @wraps(load)
    def load_weights(self: Any, weights: Weights) -> Iterator[str]:
        loaded: list[str] = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name != BIAS:
                    yield name, weight
                    continue
                if self.e_score_correction_bias is None:
                    raise ValueError(f"{self.layer_name}.{BIAS}: vLLM's layer has no such bias")
                default_weight_loader(self.e_score_correction_bias, weight)
                loaded.append(name)

        yield from load(self, others())
        yield from loaded

    return load_weights
