"""Checkpoints of Ling, Step 3 and Step 3.5 with published names and fields, and models of them to compare with.

Ling and Step 3 are plain torch, of whole sequences and without a cache. Step 3.5 is the text model of Step 3.7 in
transformers, whose layers are the same under other names.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from model_runner_base.testing.architectures import UNTIED, VOCAB_SIZE, WINDOW

Weights = dict[str, Tensor]
Reference = Callable[[Tensor], Tensor]
"""Logits [T, V] of a sequence of token ids [T]."""
Make = Callable[[Path, dict[str, Any]], Reference]
"""Writes a checkpoint of a config."""
HIDDEN, EXPERTS, HEAD = 64, 8, 16

LING: dict[str, Any] = UNTIED | {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "num_hidden_layers": 3,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "norm_head": True,
}
LING_2 = LING | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "partial_rotary_factor": 0.5,
    "rotary_dim": HEAD // 2,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "n_group": 4,
    "topk_group": 2,
    "norm_head": False,
}
STEP: dict[str, Any] = {name: value for name, value in UNTIED.items() if name != "num_key_value_heads"} | {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "num_hidden_layers": 4,
    "num_attention_groups": 2,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": HEAD,
    },
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 1.5, 1.5, 0.0],
    "num_nextn_predict_layers": 1,
}


STEP_3: dict[str, Any] = {name: value for name, value in UNTIED.items() if name != "num_key_value_heads"} | {
    "architectures": ["Step3TextForCausalLM"],
    "model_type": "step3_text",
    "num_hidden_layers": 3,
    "num_attention_groups": 1,
    "head_dim": HEAD,
    "share_q_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": None,
    "max_position_embedding": 512,
    "moe_layers_enum": "1,2",
    "moe_num_experts": EXPERTS,
    "moe_top_k": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "norm_expert_weight": True,
}


class LingConfig(transformers.PretrainedConfig):
    """The fields as they are; a published checkpoint has a class of its own, in its code."""

    model_type = "bailing_moe"


def write(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Writes a checkpoint of random weights: norms near 1, and experts of which many a number is clamped."""
    torch.manual_seed(len(shapes))
    weights = {name: torch.randn(shape) * (0.25 if len(shape) > 1 else 0.1) for name, shape in shapes.items()}
    weights |= {name: 2 * tensor for name, tensor in weights.items() if ".moe.up_proj" in name}
    if config["model_type"] != "step3p5":  # Whose norms are stored less 1.
        weights |= {name: 1 + tensor for name, tensor in weights.items() if name.endswith("norm.weight")}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return weights


def mlp_shapes(prefix: str, size: int, *experts: int) -> dict[str, tuple[int, ...]]:
    """Weights of an MLP, or of experts in one tensor."""
    wide = {f"{prefix}.{name}_proj.weight": (*experts, size, HIDDEN) for name in ("gate", "up")}
    return wide | {f"{prefix}.down_proj.weight": (*experts, HIDDEN, size)}


def outer_shapes(embeddings: str) -> dict[str, tuple[int, ...]]:
    embedded = (VOCAB_SIZE, HIDDEN)
    return {f"model.{embeddings}.weight": embedded, "lm_head.weight": embedded, "model.norm.weight": (HIDDEN,)}


def ling(path: Path, config: dict[str, Any]) -> Reference:
    """A checkpoint of Ling, and its model."""
    transformers.AutoConfig.register("bailing_moe", LingConfig, exist_ok=True)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = outer_shapes("word_embeddings")
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes[f"{layer}.attention.query_key_value.weight"] = ((num_heads + 2 * num_kv_heads) * HEAD, HIDDEN)
        shapes[f"{layer}.attention.dense.weight"] = (HIDDEN, num_heads * HEAD)
        if config.get("use_qk_norm"):
            shapes |= {f"{layer}.attention.{name}_layernorm.weight": (HEAD,) for name in ("query", "key")}
        if index < config["first_k_dense_replace"]:
            shapes |= mlp_shapes(f"{layer}.mlp", config["intermediate_size"])
            continue
        size = config["moe_intermediate_size"]
        shapes |= mlp_shapes(f"{layer}.mlp.shared_experts", size * config["num_shared_experts"])
        shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        if config.get("moe_router_enable_expert_bias"):
            shapes[f"{layer}.mlp.gate.expert_bias"] = (EXPERTS,)
        for expert in range(EXPERTS):
            shapes |= mlp_shapes(f"{layer}.mlp.experts.{expert}", size)
    weights = write(path, config, shapes)
    return lambda ids: ling_logits(config, weights, ids)


def ling_logits(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    x = weights["model.word_embeddings.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        x = x + ling_attention(config, weights, f"{layer}.attention", norm, norm(x, f"{layer}.input_layernorm"))
        hidden = norm(x, f"{layer}.post_attention_layernorm")
        is_dense = index < config["first_k_dense_replace"]
        x = x + (swiglu if is_dense else ling_experts(config))(weights, f"{layer}.mlp", hidden)
    head = weights["lm_head.weight"]
    if config["norm_head"]:
        head = head / head.norm(dim=0, keepdim=True)
    return norm(x, "model.norm") @ head.T


def ling_attention(config: dict[str, Any], weights: Weights, prefix: str, norm: Any, x: Tensor) -> Tensor:
    counts = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    heads = (x @ weights[f"{prefix}.query_key_value.weight"].T).unflatten(-1, (-1, HEAD)).transpose(0, 1)
    query, key, value = heads.split(counts)
    if config.get("use_qk_norm"):
        query, key = norm(query, f"{prefix}.query_layernorm"), norm(key, f"{prefix}.key_layernorm")
    size = int(HEAD * config.get("partial_rotary_factor", 1.0))
    return attend(query, key, value, config["rope_theta"], size) @ weights[f"{prefix}.dense.weight"].T


def attend(query: Tensor, key: Tensor, value: Tensor, base: float, size: int) -> Tensor:
    """Attention of heads [H, T, HEAD], of which the first ``size`` numbers turn: [T, H * HEAD]."""
    length = query.shape[1]
    angles = torch.arange(length)[:, None] * base ** (-torch.arange(0, size, 2) / size)

    def turn(part: Tensor) -> Tensor:
        first, second, rest = part.split([size // 2, size // 2, HEAD - size], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    query, key = turn(query).unflatten(0, (len(key), -1)), turn(key)[:, None]
    scores = (query @ key.transpose(-1, -2)) / HEAD**0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, None]
    return seen.flatten(0, 1).transpose(0, 1).flatten(1)


def swiglu(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate) * (x @ up)) @ down


def ling_experts(config: dict[str, Any]) -> Callable[[Weights, str, Tensor], Tensor]:
    def apply(weights: Weights, prefix: str, x: Tensor) -> Tensor:
        out = []
        for hidden in x:
            logits = weights[f"{prefix}.gate.weight"] @ hidden
            scores = logits.sigmoid() if "score_function" in config else logits.softmax(0)
            ranks = scores.clone()
            if config.get("moe_router_enable_expert_bias"):
                ranks += weights[f"{prefix}.gate.expert_bias"]
            if "n_group" in config:  # Only the groups whose two best experts have the largest sums.
                groups = ranks.view(config["n_group"], -1)
                best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices.tolist()
                ranks = torch.stack(
                    [
                        group if index in best else torch.full_like(group, -torch.inf)
                        for index, group in enumerate(groups)
                    ]
                ).flatten()
            chosen = ranks.topk(config["num_experts_per_tok"]).indices
            shares = scores[chosen] / scores[chosen].sum() * config.get("routed_scaling_factor", 1.0)
            parts = [swiglu(weights, f"{prefix}.experts.{expert}", hidden) for expert in chosen.tolist()]
            out.append(shares @ torch.stack(parts))
        return torch.stack(out) + swiglu(weights, f"{prefix}.shared_experts", x)

    return apply


def step_3(path: Path, config: dict[str, Any]) -> Reference:
    """A checkpoint of the text model of Step 3, and that model: queries of low rank, and keys of one head."""
    num_heads, rank, size = config["num_attention_heads"], config["share_q_dim"], config["moe_intermediate_size"]
    shapes = outer_shapes("embed_tokens")
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        rows = {"q": rank, "k": HEAD, "v": HEAD}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (rows[name], HIDDEN) for name in rows}
        shapes[f"{layer}.self_attn.inter_norm.weight"] = (rank,)
        shapes[f"{layer}.self_attn.wq.weight"] = (num_heads * HEAD, rank)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, num_heads * HEAD)
        if str(index) not in config["moe_layers_enum"]:
            shapes |= mlp_shapes(f"{layer}.mlp", config["intermediate_size"])
            continue
        shapes |= mlp_shapes(f"{layer}.moe", size, EXPERTS) | {f"{layer}.moe.gate.weight": (EXPERTS, HIDDEN)}
        shapes |= mlp_shapes(f"{layer}.share_expert", config["share_expert_dim"])
    weights = write(path, config, shapes)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def logits(ids: Tensor) -> Tensor:
        x = weights["model.embed_tokens.weight"][ids]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            hidden = norm(x, f"{layer}.input_layernorm")
            low, key, value = (hidden @ weights[f"{layer}.self_attn.{name}_proj.weight"].T for name in "qkv")
            query = norm(low, f"{layer}.self_attn.inter_norm") @ weights[f"{layer}.self_attn.wq.weight"].T
            heads = query.unflatten(-1, (-1, HEAD)).transpose(0, 1)
            seen = attend(heads, key[None], value[None], config["rope_theta"], HEAD)
            x = x + seen @ weights[f"{layer}.self_attn.o_proj.weight"].T
            hidden = norm(x, f"{layer}.post_attention_layernorm")
            if str(index) in config["moe_layers_enum"]:
                x = x + step_3_experts(config, weights, layer, hidden)
            else:
                x = x + swiglu(weights, f"{layer}.mlp", hidden)
        return norm(x, "model.norm") @ weights["lm_head.weight"].T

    return logits


def step_3_experts(config: dict[str, Any], weights: Weights, layer: str, x: Tensor) -> Tensor:
    """Runs every expert on every token, times its share."""
    scores = (x @ weights[f"{layer}.moe.gate.weight"].T).softmax(-1)
    best, chosen = scores.topk(config["moe_top_k"])
    shares = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
    gate, up, down = (weights[f"{layer}.moe.{name}_proj.weight"].transpose(1, 2) for name in ("gate", "up", "down"))
    outputs = (functional.silu(x @ gate) * (x @ up)) @ down  # [E, T, HIDDEN]
    return torch.einsum("te,eth->th", shares, outputs) + swiglu(weights, f"{layer}.share_expert", x)


def step_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of Step 3.5 by published names, also of a layer after the last, which only drafts use."""
    shapes = outer_shapes("embed_tokens")
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        own = config["attention_other_setting"] if kind == "sliding_attention" else config
        size, kv_size = own["num_attention_heads"] * HEAD, config["num_attention_groups"] * HEAD
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        rows = {"q": size, "k": kv_size, "v": kv_size, "g": size // HEAD}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (rows[name], HIDDEN) for name in rows}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, size)
        if str(index) not in config["moe_layers_enum"]:
            shapes |= mlp_shapes(f"{layer}.mlp", config["intermediate_size"])
            continue
        shapes |= mlp_shapes(f"{layer}.moe", config["moe_intermediate_size"], EXPERTS)
        shapes |= mlp_shapes(f"{layer}.share_expert", config["share_expert_dim"])
        shapes |= {f"{layer}.moe.gate.weight": (EXPERTS, HIDDEN), f"{layer}.moe.router_bias": (EXPERTS,)}
    return shapes


def step(path: Path, config: dict[str, Any]) -> Reference:
    """A checkpoint of Step 3.5, and the text model of transformers."""
    weights, num_layers = write(path, config, step_shapes(config)), config["num_hidden_layers"]
    hf: Any = transformers
    model = hf.Step3p7TextModel(hf.Step3p7TextConfig.from_pretrained(path)).eval()
    model.load_state_dict(
        {
            renamed(name): tensor
            for name, tensor in weights.items()
            if name != "lm_head.weight" and ".moe.up_proj" not in name and f"layers.{num_layers}." not in name
        }
        | {
            f"layers.{index}.mlp.experts.gate_up_proj": torch.cat(
                [weights[f"model.layers.{index}.moe.{name}_proj.weight"] for name in ("gate", "up")], dim=1
            )
            for index in map(int, config["moe_layers_enum"].split(","))
        }
    )
    return lambda ids: model(ids[None]).last_hidden_state[0] @ weights["lm_head.weight"].T


def renamed(name: str) -> str:
    """The name in transformers of a published tensor."""
    name = name.removeprefix("model.").replace(".share_expert.", ".mlp.shared_experts.")
    name = name.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias").replace(".moe.gate.", ".mlp.gate.")
    name = name.replace(".moe.gate_proj.weight", ".mlp.experts.gate_up_proj")
    return name.replace(".moe.down_proj.weight", ".mlp.experts.down_proj")
