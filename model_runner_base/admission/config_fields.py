"""Fields that vLLM's class of a model reads and a config.json lacks, with the values of published checkpoints."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from vllm.config import ModelConfig

VALUE = "VALUE"
"""Place of a value that a user has to fill in."""


@dataclass(frozen=True)
class Published:
    """Value that published checkpoints have in a field."""

    words: str
    """Value and where it is published, for a message."""
    fitting: Callable[[Any], Any] = lambda config: VALUE
    """Function of a config that lacks the field: the value that fits its other fields."""
    has_default: bool = False
    """Whether a config without the field has a value all the same, with which weights do not fit, or None."""


def _always(value: Any, model: str, has_default: bool = False) -> Published:
    return Published(f"{json.dumps(value)} in {model}", lambda config: value, has_default)


def _as(field: str, model: str) -> Published:
    return Published(f"{field} in {model}", lambda config: getattr(config, field))


def _dense_layers(model: str) -> Published:
    """Number of layers without experts at the beginning, of which transformers 5 keeps a list."""
    return Published(
        f"1 in {model}, the number of layers before the first one with experts",
        lambda config: (*(getattr(config, "mlp_layer_types", None) or ["dense"]), "sparse").index("sparse"),
        has_default=True,
    )


def _marks(field: str, kind: str, words: str) -> Published:
    """List of a mark for each layer."""
    return Published(
        f"1 for each layer with {words} and 0 for each other one in MiMo-V2-Flash",
        lambda config: [int(each == kind) for each in getattr(config, field)],
    )


def _rope(kind: str, field: str, published: float) -> Published:
    """Field of rotary embeddings, which transformers 5 keeps for each kind of layer."""
    return Published(f"{published} in MiMo-V2-Flash", lambda config: config.rope_parameters[kind][field])


PUBLISHED: dict[str, dict[str, Published]] = {
    "AfmoeForCausalLM": {
        "score_func": _always("sigmoid", "Trinity"),
        "route_norm": _always(True, "Trinity"),
        "n_group": _always(1, "Trinity"),
        "topk_group": _always(1, "Trinity"),
    },
    "DbrxForCausalLM": {"attn_config.rope_theta": _always(500000, "DBRX")},
    "Dots1ForCausalLM": {
        "moe_layer_freq": _always(1, "dots.llm1"),
        "topk_method": _always("noaux_tc", "dots.llm1"),
        "scoring_func": _always("sigmoid", "dots.llm1"),
    },
    "Gemma2ForCausalLM": {"hidden_act": _always("gelu_pytorch_tanh", "Gemma 2")},
    "Glm4MoeForCausalLM": {
        "head_dim": Published("128 in GLM-4.5", lambda config: config.hidden_size // config.num_attention_heads)
    },
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": _dense_layers("GLM-4.7-Flash")},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": Published('"mamba" or "attention" for each layer in Granite 4', has_default=True)
    },
    "HYV3ForCausalLM": {
        "first_k_dense_replace": _dense_layers("Hy3"),
        "expert_hidden_dim": _as("moe_intermediate_size", "Hy3"),
        "route_norm": _always(True, "Hy3"),
        "qk_norm": _always(True, "Hy3", has_default=True),
    },
    "KimiLinearForCausalLM": {
        "mla_use_nope": _always(True, "Kimi-Linear", has_default=True),
        "first_k_dense_replace": _dense_layers("Kimi-Linear"),
    },
    "Lfm2ForCausalLM": {
        "conv_dim": _as("hidden_size", "LFM2"),
        "block_dim": _as("hidden_size", "LFM2"),
        "block_ff_dim": _as("intermediate_size", "LFM2"),
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": Published('"conv" or "full_attention" for each layer in LFM2-8B-A1B', has_default=True)
    },
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": _always(True, "LongCat-Flash"),
        "mla_scale_kv_lora": _always(True, "LongCat-Flash"),
        "zero_expert_type": _always("identity", "LongCat-Flash"),
    },
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": _marks("layer_types", "sliding_attention", "a window"),
        "moe_layer_freq": _marks("mlp_layer_types", "sparse", "experts"),
        "layernorm_epsilon": _as("rms_norm_eps", "MiMo-V2-Flash"),
        "sliding_window_size": Published("128 in MiMo-V2-Flash", lambda config: config.sliding_window - 1),
        "swa_num_attention_heads": _as("num_attention_heads", "MiMo-V2-Flash"),
        "swa_num_key_value_heads": Published(
            "twice num_key_value_heads in MiMo-V2-Flash", lambda config: 2 * config.num_key_value_heads
        ),
        "swa_head_dim": _as("head_dim", "MiMo-V2-Flash"),
        "swa_v_head_dim": _as("v_head_dim", "MiMo-V2-Flash"),
        "add_swa_attention_sink_bias": _always(True, "MiMo-V2-Flash", has_default=True),
        "rope_theta": _rope("full_attention", "rope_theta", 5e6),
        "swa_rope_theta": _rope("sliding_attention", "rope_theta", 1e4),
        "partial_rotary_factor": _rope("full_attention", "partial_rotary_factor", 0.334),
    },
    "MiniMaxM2ForCausalLM": {
        "rotary_dim": Published(
            "64 in MiniMax-M2, half of head_dim",
            lambda config: int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1)),
        ),
        "scoring_func": _always("sigmoid", "MiniMax-M2"),
        "use_routing_bias": _always(True, "MiniMax-M2", has_default=True),
    },
}
"""Fields by architecture. A dot leads to a field of a config within the config.

They are those that published checkpoints have, vLLM reads, and a config that transformers writes may lack. Some have a
default in vLLM, with which tokens would be wrong, so a message names all that lack.
"""


def describe_lack(model_config: ModelConfig, error: Exception) -> str | None:
    """Says which fields a config lacks, if ``error`` comes of that while its model is made; None if it does not.

    An AttributeError says itself which object lacks what. Any other error comes of a lack if config.json is without a
    field that the published ones have, and whose default does not fit them.
    """
    architecture, config = model_config.architecture, model_config.hf_config
    published = PUBLISHED.get(architecture, {})
    stored = _stored_config(model_config) if published else None
    lacking = {} if stored is None else {name: each for name, each in published.items() if not _has(stored, name)}
    if isinstance(error, AttributeError):
        place = _place(config, error.obj)
        if place is None:
            return None
        name = f"{place}{error.name}"
        lacking = {name: published.get(name, Published("")), **lacking}
    elif not any(each.has_default for each in lacking.values()):
        return None
    overrides: dict[str, Any] = {}
    for name, each in lacking.items():
        _set(overrides, name, _fitting(each, config))
    names = ", ".join(f"{name} ({each.words})" if each.words else name for name, each in lacking.items())
    pronoun = "it" if len(lacking) == 1 else "them"
    source = "" if all(each.words for each in lacking.values()) else f", as published checkpoints have {pronoun},"
    text = json.dumps(overrides).replace(f'"{VALUE}"', VALUE)
    return (
        f"its config.json lacks {names}, which vLLM's {architecture} reads: add {pronoun}{source} or pass "
        f"--hf-overrides '{text}'"
    )


def _fitting(published: Published, config: PretrainedConfig) -> Any:
    try:
        return published.fitting(config)
    except (AttributeError, KeyError, TypeError):  # The config lacks what that is computed from, too.
        return VALUE


def _place(config: PretrainedConfig, sought: object) -> str | None:
    """Path of a config within another, with a dot at its end; None if it is no config of this checkpoint."""
    configs = dict(_configs(config))
    if not isinstance(sought, PretrainedConfig):
        return None
    # vLLM hands copies of some configs to its models.
    alike = [path for path, each in configs.items() if type(each) is type(sought)]
    return next((path for path, each in configs.items() if each is sought), next(iter(alike), None))


def _configs(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields a config and those within it, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _configs(value, f"{path}{name}.")


def _stored_config(model_config: ModelConfig) -> dict[str, Any] | None:
    """The checkpoint's config.json with the user's overrides; None if it has none, or if overrides are a function."""
    overrides = model_config.hf_overrides
    if callable(overrides):
        return None
    path = model_config.hf_config_path or model_config.model
    try:
        stored, _ = PretrainedConfig.get_config_dict(path, revision=model_config.revision)
    except (OSError, ValueError):  # A checkpoint in another format.
        return None
    return {**stored, **overrides}


def _has(stored: dict[str, Any], field: str) -> bool:
    """Whether a config has a value in a field."""
    value: Any = stored
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value is not None


def _set(overrides: dict[str, Any], field: str, value: Any) -> None:
    *parents, name = field.split(".")
    for parent in parents:
        overrides = overrides.setdefault(parent, {})
    overrides[name] = value
