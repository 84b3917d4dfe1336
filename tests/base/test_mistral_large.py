"""Mistral Large 3, whose files have Mistral's own names: greedy tokens equal HF transformers in float32.

A user would notice wrong tokens past ``original_max_position_embeddings``, from where queries grow with their position.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import engine
from lane import HAS_OPENXLA
from safetensors.torch import save_file

from model_runner_base.testing.architectures import MAX_LENGTH, VOCAB_SIZE
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.models import vary

pytestmark = pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no class to compare with")

PROMPTS = random_prompts(130, [1, 5, 33, 90, 200])
ORIGINAL_LENGTH = 64
SIZES = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": ORIGINAL_LENGTH}
NAMES = {
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp.gate.weight": "gate.weight",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
}
"""Mistral's names of what transformers names otherwise, longer ones first."""


def make_reference() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    classes: Any = transformers
    config = classes.Mistral4Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters=rope | YARN,
        **SIZES,
    )
    torch.manual_seed(0)
    model = classes.Mistral4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        vary(name, parameter)
    return model


def write_files(path: Path, model: Any) -> None:
    """Writes a model with Mistral's names and configuration."""
    config, stored = model.config, {}
    for name, tensor in model.state_dict().items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)
            base = name.removesuffix("gate_up_proj")
            parts = {f"{base}{expert}.{kind}.weight": one for kind, half in halves for expert, one in enumerate(half)}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            parts = {f"{base}{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        for part, values in parts.items():
            for old, new in NAMES.items():
                part = part.replace(old, new)
            stored[part] = values.clone().contiguous()
    path.mkdir()
    save_file(stored, path / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": 1e4,
        "tied_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        **SIZES,
        "moe": {
            "num_experts": config.n_routed_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "expert_hidden_dim": config.moe_intermediate_size,
            "first_k_dense_replace": config.first_k_dense_replace,
            "route_every_n": 1,
            "num_shared_experts": 1,
            "routed_scale": 1.0,
            "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1,
        },
        "yarn": {"factor": 4, "original_max_position_embeddings": ORIGINAL_LENGTH, "beta": 32, "alpha": 1},
        "llama_4_scaling": {"original_max_position_embeddings": ORIGINAL_LENGTH, "beta": 0.5},
    }
    (path / "params.json").write_text(json.dumps(params))


@torch.no_grad()
def test_equals_transformers(tmp_path: Path) -> None:
    """Prompts in chunks and mixed batches, to three times the length from which queries grow."""
    reference = make_reference()
    write_files(tmp_path / "mistral", reference)
    options = {"config_format": "mistral", "load_format": "mistral", "max_model_len": 256, "enforce_eager": True}
    with engine(tmp_path / "mistral", **options) as llm:
        assert llm.llm_engine.model_config.architecture == "MistralLarge3ForCausalLM"
        for prompt, got in zip(PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(16))), strict=True):
            logits = reference(torch.tensor([[*prompt, *got[:-1]]])).logits[0, len(prompt) - 1 :]
            assert got == logits.argmax(dim=-1).tolist()
