"""Models whose keys and values differ in head size, and whose classes choose vLLM's own kernels for that."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKENDS = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
"""Names of the backends that a model's class may choose."""
CHOOSES_BACKENDS = BACKENDS[1] in AttentionBackendEnum.__members__
"""Whether the classes of MiMo-V2 choose backends. In releases that do not have these, they pad values."""


def has_unequal_heads(architecture: str, config: Any) -> bool:
    """Whether a model's class chooses a backend for keys and values of unequal head sizes by itself.

    Args:
        config: the text model's config from ``config.json``.
    """
    if not CHOOSES_BACKENDS or not architecture.startswith("MiMoV2"):
        return False
    sizes = ("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim")
    return any(getattr(config, keys, None) != getattr(config, values, None) for keys, values in sizes)


def has_own_kernels(architecture: str, config: Any) -> bool:
    """Whether a model's class runs keys and values of unequal head sizes with kernels that it names itself."""
    return "Pangu" in architecture and getattr(config, "param_sink_number", 0) > 0
