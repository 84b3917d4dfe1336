"""Draft models for the tiny checkpoints: one that is always right, one that often is, one that never is, and a head;
and drafts by what a request's next tokens will be."""

import json
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.models import TinyModel

NUM_DRAFTS = 3


def speculation(kind: str, model: TinyModel) -> dict[str, Any]:
    """A ``speculative_config``; the draft model that it names is written next to the model's checkpoint."""
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    method, make = _DRAFTS[kind]
    path = model.path.with_name(f"{model.path.name}-{kind}-draft")
    if not path.exists():
        path.mkdir()
        config = json.loads((model.path / "config.json").read_text())
        weights = load_file(model.path / "model.safetensors")
        config, weights = make(*_without_towers(config, weights))
        (path / "config.json").write_text(json.dumps(config))
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        for file in model.path.glob("*token*"):
            shutil.copy(file, path)
    more = {"parallel_drafting": True} if kind == "parallel" else {}
    return {"method": method, "model": str(path), "num_speculative_tokens": NUM_DRAFTS} | more


class KnownDrafts:
    """Drafts that take the place of prompt lookup's, of requests whose ``counts`` [prompt] tokens are known: some right
    ones followed by wrong ones, or ``is_wrong``: as many as may be, all of them wrong."""

    def __init__(self, llm: LLM, model: TinyModel, counts: Mapping[tuple[int, ...], int], is_wrong: bool) -> None:
        self._known, self._is_wrong = runner_of(llm).parts.requests.token_ids, is_wrong
        self._rng = np.random.default_rng(5)
        self._texts = [np.array((*prompt, *model.greedy(prompt, count))) for prompt, count in counts.items()]

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
        """Does as ``HostDrafter.look_up``."""
        counts = zip(rows.tolist(), num_tokens.tolist(), strict=True)
        return [self._drafts(self._known[row, :count]) for row, count in counts]

    def _drafts(self, tokens: np.ndarray) -> list[int]:
        count, places = len(tokens), NUM_DRAFTS + 1
        for text in self._texts:
            if len(text) > count and (text[:count] == tokens).all():
                drafts = text[count : count + NUM_DRAFTS].copy()
                drafts[0 if self._is_wrong else self._rng.integers(places) :] += 1
                num_drafts = NUM_DRAFTS if self._is_wrong else self._rng.integers(places)
                return (drafts[:num_drafts] % VOCAB_SIZE).tolist()
        return []


Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]


_NAMES_OF_A_LLAMA = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "embed_tokens.weight",
    "model.norm.weight",
)


def _without_towers(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """The checkpoint; of a vision model, its text part as a Llama: no biases, no further norms, layers of one kind."""
    if "text_config" not in config:
        return config, weights
    of_text = {}
    for name, tensor in weights.items():
        if name.endswith("lm_head.weight"):
            of_text["lm_head.weight"] = tensor
        elif "vis" not in name and name.endswith(_NAMES_OF_A_LLAMA):  # "vision_tower", "visual"
            of_text[f"model.{name.rpartition('language_model.')[2].removeprefix('model.')}"] = tensor
    left_out = ("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "_sliding_window_pattern")
    text = {name: value for name, value in config["text_config"].items() if name not in left_out}
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    return text | {"model_type": "llama"}, of_text


def _same(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    return config, weights


def _with_masks(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """The model itself, with a mask token that it was never trained on: its first draft is right, no other."""
    return config | {"pard_token": 5}, weights


def _noisy(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """The model with noise in its weights: at some places another token is the likeliest."""
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    return config, {name: tensor + 0.03 * tensor.std() * noise[name] for name, tensor in weights.items()}


def _wrong(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """A model that finds least likely what the target finds likeliest. It also has another number of KV heads."""
    head_size = config["hidden_size"] // config["num_attention_heads"]
    config = config | {"num_key_value_heads": 1, "head_dim": head_size}
    weights = {
        name: tensor[:head_size].contiguous() if "k_proj" in name or "v_proj" in name else tensor
        for name, tensor in weights.items()
    }
    return config, weights | {"lm_head.weight": -weights["lm_head.weight"]}


def _head(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """An EAGLE head: the model's last layer over half of the token's embedding plus half of the hidden state."""
    last = config["num_hidden_layers"] - 1
    prefix = f"model.layers.{last}."
    layer = {f"layers.0.{name.removeprefix(prefix)}": w for name, w in weights.items() if name.startswith(prefix)}
    del layer["layers.0.input_layernorm.weight"]
    half = 0.5 * torch.eye(config["hidden_size"])
    config = config | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    return config, layer | {"fc.weight": torch.cat((half, half), dim=1)}


def _head_over_layers(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """An EAGLE-3 head: the model's last layer over the same halves, where the hidden state is its fourth layer's."""
    size, last = config["hidden_size"], config["num_hidden_layers"] - 1
    prefix = f"model.layers.{last}."
    layer = {f"midlayer.{name.removeprefix(prefix)}": w for name, w in weights.items() if name.startswith(prefix)}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"midlayer.self_attn.{name}.weight"]
        layer[f"midlayer.self_attn.{name}.weight"] = torch.cat((0.5 * weight, 0.5 * weight), dim=1)
    config = config | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, min(4, last)],
        "tie_word_embeddings": False,
    }
    return config, layer | {
        "fc.weight": torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), dim=1),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "norm.weight": weights["model.norm.weight"].clone(),
        "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone(),
    }


def _random_head(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """An EAGLE-3 head of random weights over three layers of any model: a Llama's layer with full attention."""
    size, head_size, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    inner, heads, kv_heads = 2 * size, config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
    generator = torch.Generator().manual_seed(0)
    drawn = {
        **{f"midlayer.self_attn.{name}_proj.weight": (n * head_size, 2 * size) for name, n in shapes.items()},
        "midlayer.self_attn.o_proj.weight": (size, heads * head_size),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "fc.weight": (size, 3 * size),
        "lm_head.weight": (vocab, size),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    head = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in drawn.items()}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "max_position_embeddings": config["max_position_embeddings"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "tie_word_embeddings": False,
    }, head | {f"{name}.weight": torch.ones(size) for name in norms}


def _further_heads(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """Medusa's heads, each of which drafts what the model finds likeliest next."""
    size = config["hidden_size"]
    heads = {f"blocks.{index}.layers.0.weight": torch.zeros(size, size) for index in range(NUM_DRAFTS)}
    heads |= {f"lm_heads.{index}.weight": weights["lm_head.weight"].clone() for index in range(NUM_DRAFTS)}
    config = {"hidden_size": size, "vocab_size": config["vocab_size"], "num_hidden_layers": 1}
    return config | {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": NUM_DRAFTS}, heads


_DRAFTS = {
    "same": ("draft_model", _same),
    "parallel": ("draft_model", _with_masks),
    "noisy": ("draft_model", _noisy),
    "wrong": ("draft_model", _wrong),
    "head": ("eagle", _head),
    "head-over-layers": ("eagle3", _head_over_layers),
    "random-head": ("eagle3", _random_head),
    "further-heads": ("medusa", _further_heads),
}
