"""Layers that vLLM makes otherwise than a model's authors, or with kernels of one device."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from torch import nn
from vllm import ModelRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.models.modernbert import ModernBertAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once
from model_runner_base.vllm_compat.probes.models import UNEQUAL_HEADS_BACKENDS, has_unequal_heads

COHERE_LAYERS = ("CohereAttention", "Cohere2MoeAttention")
"""Names of vLLM's classes, which not every release has."""


def correct_windows(model: nn.Module) -> None:
    """Gives the local layers of Cohere 2 the window of their config, as transformers does.

    Some releases of vLLM make the window a token wider. Their source says that the models were trained so;
    transformers, and earlier releases, have it as it is in the config.
    """
    module: Any
    for module in model.modules():
        if type(module).__name__ in COHERE_LAYERS and module.sliding_window is not None:
            window = module.config.sliding_window
            module.sliding_window = module.attn.sliding_window = window
            # vLLM's own kernels count the tokens on each side.
            is_one_number = isinstance(module.attn.impl.sliding_window, int)
            module.attn.impl.sliding_window = window if is_one_number else (window - 1, 0)


def correct_modernbert(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives local layers their window, and all layers rotations that are as exact as ``dtype``, the model's.

    A token sees ``local_attention // 2`` tokens on each side. Some releases give the layer that number as a window, and
    a window counts the token itself. vLLM keeps the rotations in float16.
    """
    for module in model.modules():
        if isinstance(module, ModernBertAttention):
            if module.attn.sliding_window is not None:
                module.attn.sliding_window = module.config.local_attention // 2 + 1
            rotary = module.rotary_emb
            rotary.dtype = dtype
            rotary.register_buffer("cos_sin_cache", rotary._compute_cos_sin_cache().to(dtype), persistent=False)


APERTUS = "ApertusForCausalLM"


def use_models_dtype(vllm_config: VllmConfig) -> None:
    """Has vLLM make the parameters of xIELU, Apertus' activation, in the model's dtype where transformers does so.

    vLLM makes them in bfloat16, also for a model in float32. So does transformers 4, while transformers 5 loads them in
    the model's dtype, which is more exact. Does nothing for other models.
    """
    is_apertus = vllm_config.model_config.architecture == APERTUS
    if is_apertus and int(transformers.__version__.partition(".")[0]) >= 5:
        wrap_once(XIELU, "__init__", _in_default_dtype)


def _in_default_dtype(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def init(self: XIELU, *args: Any, **kwargs: Any) -> None:
        # torch's default dtype is the model's while vLLM makes a model.
        make(self, *args, **{"dtype": torch.get_default_dtype()} | kwargs)

    return init


KIMI_LINEAR = "KimiLinearForCausalLM"
PLAIN_KIMI_LINEAR = "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM"


def use_plain_kimi_linear(vllm_config: VllmConfig) -> None:
    """Has vLLM make Kimi-Linear of plain layers.

    vLLM 0.33 has two classes of it. The one that its registry names has layers of NVIDIA's kernels, which are in one
    piece with their projections. The other one, which AMD's and Intel's devices get, has the layers that DeepSeek and
    Qwen3-Next have. Does nothing for other models, and in older releases.
    """
    if vllm_config.model_config.architecture != KIMI_LINEAR:
        return
    registered = ModelRegistry.models[KIMI_LINEAR]
    if getattr(registered, "module_name", "").startswith("vllm.models.kimi_k3"):
        ModelRegistry.register_model(KIMI_LINEAR, PLAIN_KIMI_LINEAR)


_UNEQUAL_HEADS = "model_runner_base.attention.unequal_heads.UnequalHeadsBackend"


def use_plain_unequal_heads(model: ModelConfig) -> None:
    """Puts the base's own attention in place of the backends that a model's class chooses by itself.

    Some classes do so for keys and values of unequal head sizes, and name kernels of one device. Other models keep
    vLLM's backends.
    """
    for name in UNEQUAL_HEADS_BACKENDS if has_unequal_heads(model.architecture, model.hf_text_config) else ():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], _UNEQUAL_HEADS)
