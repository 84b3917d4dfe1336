"""Lightning attention of MiniMax-Text-01 equals HF transformers in float32.

Transformers writes decays into its checkpoints, which vLLM's class does not take. So they are left out, and the
reference is the model in memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from safetensors.torch import save_file
from transformers import MiniMaxConfig, MiniMaxForCausalLM
from vllm import LLM

from model_runner_base.models.loader import CheckpointError
from model_runner_base.testing.architectures import UNTIED
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, metric, tokens_of
from model_runner_base.testing.models import vary

PROMPTS = random_prompts(98, [1, 2, 5, 16, 33, 64, 90, 130])
NEW_TOKENS = 12
CONFIG: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "block_size": 16,
    "full_attn_beta_factor": 0.5,
    "linear_attn_alpha_factor": 1.5,
    "mlp_beta_factor": 0.75,
    "postnorm": True,
}


def make(path: Path, **changes: Any) -> MiniMaxForCausalLM:
    """Writes a tiny checkpoint; returns the model."""
    torch.manual_seed(7)
    model = MiniMaxForCausalLM(MiniMaxConfig(**UNTIED, **CONFIG | changes)).eval()
    for name, parameter in model.named_parameters():
        vary(name, parameter)
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["MiniMaxForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return model


def expected(model: MiniMaxForCausalLM, prompts: list[tuple[int, ...]], count: int) -> list[list[int]]:
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, use_cache=False)
        out.append(tokens[0, len(prompt) :].tolist())
    return out


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, MiniMaxForCausalLM]]:
    path = tmp_path_factory.mktemp("minimax")
    model = make(path)
    options: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 18}
    with engine(path, **options, kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=32, enforce_eager=True) as llm:
        yield llm, model


def test_equals_transformers(served: tuple[LLM, MiniMaxForCausalLM]) -> None:
    llm, model = served
    want = expected(model, PROMPTS, NEW_TOKENS)
    assert [tokens_of(generate(llm, [prompt], greedy(NEW_TOKENS)))[0] for prompt in PROMPTS[:4]] == want[:4]
    assert tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))) == want


def test_preemption(served: tuple[LLM, MiniMaxForCausalLM]) -> None:
    llm, model = served
    prompts = random_prompts(99, [60, 70, 50, 40])
    assert tokens_of(generate(llm, prompts, greedy(60))) == expected(model, prompts, 60)
    assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


def test_weights_are_not_loaded_again(served: tuple[LLM, MiniMaxForCausalLM]) -> None:
    with pytest.raises(CheckpointError, match="start another engine; nothing was changed"):
        served[0].collective_rpc("reload_weights")


def test_layers_added_before_the_norm_are_refused(tmp_path: Path) -> None:
    make(tmp_path, postnorm=False)
    with pytest.raises(ValueError, match="set postnorm to true"), engine(tmp_path, enforce_eager=True):
        pass
