"""Models whose keys and values differ in head size, and whose classes choose vLLM's own kernels for that."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

_CHOOSES_KERNELS = hasattr(AttentionBackendEnum, "TRITON_ATTN_DIFFKV")
"""Whether the classes of MiMo-V2 choose kernels. In releases that do not have these, they pad values."""


def chooses_kernels(architecture: str, config: Any) -> bool:
    """Whether a model's class chooses kernels for keys and values of unequal head sizes by itself.

    Args:
        config: the text model's config from ``config.json``.
    """
    if "Pangu" in architecture:
        return getattr(config, "param_sink_number", 0) > 0
    if not _CHOOSES_KERNELS or not architecture.startswith("MiMoV2"):
        return False
    sizes = ("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim")
    return any(getattr(config, keys, None) != getattr(config, values, None) for keys, values in sizes)
