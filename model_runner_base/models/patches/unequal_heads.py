"""Backends that vLLM's classes choose for keys and values of unequal head sizes: plain torch takes their place."""

from vllm.config import ModelConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from model_runner_base.vllm_compat.probes.unequal_heads import BACKENDS, has_unequal_heads

_OURS = "model_runner_base.attention.unequal_heads.UnequalHeadsBackend"


def use_plain_unequal_heads(model: ModelConfig) -> None:
    """Has vLLM's class of such a model find the base's own attention under the names of the kernels that it chooses.

    Other models keep vLLM's.
    """
    for name in BACKENDS if has_unequal_heads(model.architecture, model.hf_text_config) else ():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], _OURS)
