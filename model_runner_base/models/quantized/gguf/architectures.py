"""Architectures of GGUF files, and the config that a file's metadata stands for.

A key that is not known here is an error: a config without it would describe another model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.quantized.gguf.file import GgufFile

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_NEEDED = {"block_count", "feed_forward_length", "embedding_length", "attention.head_count", "context_length"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Numbers of scaled rotary positions."""
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_READ_OTHERWISE = {
    *_SCALING,
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "rope.dimension_count",
    "attention.value_length",
    "vocab_size",
}


@dataclass(frozen=True)
class Architecture:
    """Model of transformers that an architecture of llama.cpp stands for."""

    model_type: str
    class_name: str
    further: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config by the metadata keys of this architecture, in addition to those that all have."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that llama.cpp has in its code."""
    other_types: tuple[str, ...] = ()
    """Types of models with the same tensors, which a config that the user names may have."""
    deepest: int | None = None
    """Layers of the largest model, whose attention has a scale of its own."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", other_types=("mistral",)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _EXPERTS, {"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, {"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _WINDOW | _CAPS, _GELU, deepest=46),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WINDOW | _CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _GELU | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        deepest=62,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _WINDOW),
}
"""Architectures that are served, by their names in files."""


def architecture_of(file: GgufFile) -> Architecture:
    kind = file.metadata.get("general.type") or "model"
    if kind != "model":
        raise UnsupportedConfigError(f"{file.path} is no model but of type {kind}: name the file of the model")
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedConfigError(
            f"GGUF files of architecture {file.architecture} are not read, only those of {', '.join(ARCHITECTURES)}: "
            f"instead of {file.path} use the checkpoint that it was made from"
        )
    return ARCHITECTURES[file.architecture]


def config_of_file(file: GgufFile) -> dict[str, Any]:
    """The ``config.json`` of a file's model; raises UnsupportedConfigError for metadata that is not understood."""
    architecture = architecture_of(file)
    own = _own_metadata(file)
    fields = _FIELDS | dict(architecture.further)
    for key in own:
        if key not in fields and key not in _READ_OTHERWISE:
            raise _not_understood(file, f"{file.architecture}.{key}")
    if missing := sorted(_NEEDED - own.keys()):
        raise UnsupportedConfigError(f"{file.path} has no {file.architecture}.{missing[0]}: copy the file again")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "tie_word_embeddings": "output.weight" not in file.shapes,
        **architecture.fixed,
        **{fields[key]: value for key, value in own.items() if key in fields},
    }
    if "token_embd.weight" in file.shapes:
        config["vocab_size"] = file.shapes["token_embd.weight"][0]
    heads = config["num_attention_heads"]
    if lists := [name for name, value in config.items() if isinstance(value, list) and name != "architectures"]:
        raise UnsupportedConfigError(f"{file.path} has {lists[0]} by layer, which is not read: use another checkpoint")
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if architecture.deepest is not None:
        is_deepest = config["num_hidden_layers"] == architecture.deepest
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_deepest else config["head_dim"]
    return config | _rotary(file, own, config) | _token_ids(file)


def _own_metadata(file: GgufFile) -> dict[str, Any]:
    prefix = f"{file.architecture}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _not_understood(file: GgufFile, what: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{what} of {file.path} is not understood: name the model that the file was made from, by hf_config_path and "
        "tokenizer"
    )


def _rotary(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields about rotary positions."""
    if own.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise _not_understood(file, f"{file.architecture}.rope.dimension_count")
    if own.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise _not_understood(file, f"{file.architecture}.attention.value_length")
    for name in file.shapes:
        if name.startswith("rope_factors"):
            raise _not_understood(file, name)
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise _not_understood(file, f"{file.architecture}.rope.scaling.type")
    if kind != "none":
        return {"rope_scaling": {"rope_type": kind} | {_SCALING[key]: own[key] for key in _SCALING if key in own}}
    return {} if "rope_freqs.weight" not in file.shapes else _llama3(file, config)


def _llama3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling of Llama 3.1 and later, of which a file has the results alone: the usual numbers must give these."""
    factors = file.read("rope_freqs.weight")
    if (factors == 1).all():
        return {}
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    base, size = config.get("rope_theta", 10000.0), config["head_dim"]
    lengths = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = ((original / lengths - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise _not_understood(file, "rope_freqs.weight")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": original}}


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """Special tokens, None for those that a file does not have. A chat model's turns may end with a token of their
    own."""
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": (ends[0] if len(ends) == 1 else ends) if ends else None,
        "pad_token_id": ids["padding"],
    }
