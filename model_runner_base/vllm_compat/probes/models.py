"""Probes of vLLM's classes of models: which of them compute otherwise than most, and by what."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from model_runner_base.vllm_compat.probes.experts import IS_ONE_MODULE

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers that vLLM's Transformers backend tells apart; it has all others see every key."""


def uses_transformers_backend(model_config: Any) -> bool:
    """Whether vLLM serves a model by transformers' own classes (its Transformers backend)."""
    # A model within another one, such as the text model of Idefics 3, may have no architecture of its own.
    return bool(model_config.architectures and model_config.using_transformers_backend())


def other_layer_type(model_config: Any) -> str | None:
    """The first type of layer that the Transformers backend would take for full attention; None if there is none."""
    types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    other = next((name for name in types if name not in LAYER_TYPES), None)
    return other if other is not None and uses_transformers_backend(model_config) else None


UNEQUAL_HEADS_BACKENDS = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
"""Names of the attention backends that a model's class may choose for keys and values of unequal head sizes."""
CHOOSES_BACKENDS = UNEQUAL_HEADS_BACKENDS[1] in AttentionBackendEnum.__members__
"""Whether the classes of MiMo-V2 choose attention backends. In releases that do not have these, they pad values."""


def has_unequal_heads(architecture: str, config: Any) -> bool:
    """Whether a model's class chooses a backend for keys and values of unequal head sizes by itself.

    Args:
        config: the text model's config from ``config.json``.
    """
    if not CHOOSES_BACKENDS or not architecture.startswith("MiMoV2"):
        return False
    sizes = ("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim")
    return any(getattr(config, keys, None) != getattr(config, values, None) for keys, values in sizes)


def chooses_blocks(model_config: Any) -> bool:
    """Whether a model has layers whose tokens see blocks that an indexer chooses for each KV head (MiniMax M3)."""
    settings = getattr(model_config.hf_text_config, "sparse_attention_config", None) or {}
    return any(settings.get("sparse_attention_freq") or ()) and is_minimax_m3(model_config.architecture)


def is_minimax_m3(architecture: str) -> bool:
    """Whether an architecture is vLLM's own class of MiniMax M3, whose norms and attention are kernels of a GPU."""
    return architecture.startswith("MiniMaxM3Sparse")


DEEPSEEK_V4 = "DeepseekV4ForCausalLM"


def is_deepseek_v4(architecture: str) -> bool:
    """Whether an architecture is vLLM's own class of DeepSeek V4, which keeps compressed entries of tokens."""
    return architecture == DEEPSEEK_V4


def tokens_per_entry(model_config: Any) -> int:
    """Largest number of tokens that a layer compresses to one entry of a cache (DeepSeek V4); 1 for other models."""
    return max(compression_rates(model_config), default=1)


def compression_rates(model_config: Any) -> set[int]:
    """Numbers of tokens that layers compress to one entry of a cache (DeepSeek V4); none for other models."""
    if not is_deepseek_v4(model_config.architecture):
        return set()
    config = model_config.hf_text_config
    rates: dict[str, int] = getattr(config, "compress_rates", None) or {}
    return {rate for kind in getattr(config, "layer_types", ()) if (rate := rates.get(kind, 1)) > 1}


def misread_positions(config: Any) -> str | None:
    """Rotary positions of DeepSeek V4 that vLLM's class makes otherwise than the config says, and what to do; None if
    there are none.

    The class takes both bases from the config's own fields. Layers without entries have plain positions, and layers
    with entries YaRN of any type that is not "default", whose numbers it does not scale.

    Args:
        config: the text model's config from ``config.json``.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    parts: dict[str, Any] = {name: parameters.get(name) for name in ("main", "compress")}
    if not all(isinstance(part, dict) for part in parts.values()):
        return "no main and compress in rope_parameters: correct config.json"
    main, compress = parts.values()
    for part, name in ((main, "rope_theta"), (compress, "compress_rope_theta")):
        base, theta = getattr(config, name), part.get("rope_theta", getattr(config, name))
        if theta != base:
            return f"{name}={base}, and rope_theta={theta} in rope_parameters: make them equal in config.json"
    kind, factor = compress.get("rope_type", "default"), compress.get("attention_factor")
    if (of_main := main.get("rope_type", "default")) != "default":
        return f'rope_type={of_main} of layers without entries: use "default", or another model'
    if kind not in ("default", "yarn"):
        return f'rope_type={kind} of layers with entries: use "default" or "yarn", or another model'
    if factor not in (None, 1.0) or (kind == "yarn" and factor is None):
        return f"attention_factor={factor}: set it to 1.0 in rope_parameters, or use another model"
    return None


def has_own_kernels(architecture: str, config: Any) -> bool:
    """Whether a model's class runs keys and values of unequal head sizes with kernels that it names itself."""
    return "Pangu" in architecture and getattr(config, "param_sink_number", 0) > 0


def left_out_of_ling(architecture: str, config: Any) -> dict[str, bool]:
    """Messages and conditions of UnsupportedConfigError: what this release of vLLM leaves out of Ling's config.

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
