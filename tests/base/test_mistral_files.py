"""Checkpoints with Mistral's own names, in FP8: tokens are those of the plain weights that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import engine
from greedy import expected, generate
from safetensors.torch import load_file, save_file
from test_dequantise import SCHEMES

from model_runner_base.models.layers.cache_scales import CacheScales
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import write_checkpoints

PROMPTS = random_prompts(20, [5, 30, 70])
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "weight_scale": "qscale_weight",
}
"""Mistral's names of what transformers names otherwise."""


def write_files(path: Path, source: Path) -> None:
    """Writes the checkpoint at ``source`` with Mistral's names, configuration and order of rotated numbers."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        for rotated, count in (("wq.weight", heads), ("wk.weight", kv_heads)):
            if name.endswith(rotated):  # Two numbers that are rotated together lie side by side.
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        stored[name] = tensor.contiguous()
        if name.endswith("qscale_weight"):
            stored[name.replace("qscale_weight", "qscale_act")] = torch.tensor(0.5)
    path.mkdir()
    save_file(stored, path / "consolidated.safetensors")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_dim": config["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": (config.get("rope_parameters") or config)["rope_theta"],
        "tied_embeddings": config["tie_word_embeddings"],
        "max_position_embeddings": config["max_position_embeddings"],
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }
    (path / "params.json").write_text(json.dumps(params))


def test_tokens_are_those_of_plain_weights(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    quantised, plain = write_checkpoints(model, SCHEMES["fp8"], tmp_path)
    write_files(tmp_path / "mistral", quantised.path)
    assert expected(plain, PROMPTS) != expected(model, PROMPTS)  # Else this test would show nothing.
    options = {"config_format": "mistral", "load_format": "mistral", "max_model_len": 128, "dtype": "float32"}
    with engine(tmp_path / "mistral", **options, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)


def test_scales_of_caches_are_refused() -> None:
    name = "layers.0.attention.kv_fake_quantizer.qscale_act"
    with pytest.raises(ValueError, match=f"{name}: .* set kv_cache_dtype=auto"):
        list(CacheScales().take(torch.nn.Module(), [("output.weight", torch.ones(1)), (name, torch.ones(1))]))
