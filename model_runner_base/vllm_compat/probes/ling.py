"""Fields of Ling's config that its class in vLLM 0.16 leaves out; later releases compute them."""

from typing import Any

from model_runner_base.vllm_compat.probes.experts import IS_ONE_MODULE


def left_out(architecture: str, config: Any) -> dict[str, bool]:
    """Messages and conditions of UnsupportedConfigError: what this release of vLLM computes otherwise than the authors.

    Args:
        config: the text model's config from ``config.json``.
    """
    if not IS_ONE_MODULE or not architecture.startswith("BailingMoe"):
        return {}
    share = getattr(config, "partial_rotary_factor", 1.0)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    refusals = {
        "this release of vLLM takes the head of Ling as it is stored, and norm_head asks for it normalised: use vLLM "
        "0.33, or a checkpoint without norm_head": bool(getattr(config, "norm_head", False)),
        "this release of vLLM leaves out partial_rotary_factor in Ling: set rotary_dim to "
        f"{int(size * share)} in config.json": share != 1 and not hasattr(config, "rotary_dim"),
    }
    return refusals
