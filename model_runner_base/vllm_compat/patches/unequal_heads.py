"""Backends that vLLM's classes choose for keys and values of unequal head sizes: plain torch takes their place."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from model_runner_base.vllm_compat.probes.unequal_heads import BACKENDS

_OURS = "model_runner_base.attention.unequal_heads.UnequalHeadsBackend"


def use_plain_unequal_heads() -> None:
    """Has vLLM's classes find the base's own attention under the names of the kernels that they choose."""
    for name in BACKENDS:
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], _OURS)
