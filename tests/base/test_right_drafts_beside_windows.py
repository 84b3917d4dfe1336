"""Drafts that are right beside sliding windows under asynchronous scheduling, and prompts that are in the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from conftest import engine
from safetensors.torch import load_file, save_file
from test_speculation import multi_token_prediction

from model_runner_base.testing.architectures import WINDOW
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import generate, greedy, metric, tokens_of
from model_runner_base.testing.models import TinyModel

LENGTH = 50.0
"""Length of embeddings at which the layers decide three tokens of ten."""
Drafting = tuple[TinyModel, Path, dict[str, Any]]
"""The reference, the checkpoint that is served, and its ``speculative_config``."""


def turning(model: TinyModel, path: Path, length: float, **config: Any) -> tuple[TinyModel, torch.Tensor]:
    """A copy of the model whose embeddings turn by one rotation [size, size] from token to token, and the rotation.

    The successor of a token is the next number, unless the layers say otherwise, which is the rarer the greater the
    ``length`` of the embeddings.
    """
    copytree(model.path, path)
    told, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    vocab_size, size = weights["model.embed_tokens.weight"].shape
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    states = [torch.nn.functional.normalize(torch.randn(size, generator=generator), dim=0)]
    for _ in range(vocab_size - 1):
        states.append(rotation @ states[-1])
    weights["model.embed_tokens.weight"] = length * torch.stack(states)
    weights["lm_head.weight"] = torch.stack(states).roll(1, dims=0)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(told | {"tie_word_embeddings": False} | config))
    return TinyModel(path), rotation


def without_layers(path: Path, **weights: torch.Tensor) -> None:
    """Rewrites a head's file: its layers add nothing, and these weights, named by their ends, are others."""
    head = load_file(path / "model.safetensors")
    for name, weight in head.items():
        if "midlayer" in name or "mtp_layers" in name:
            head[name] = torch.zeros_like(weight) if "o_proj" in name or "down_proj" in name else weight
        head[name] = next((other for end, other in weights.items() if name.endswith(f"{end}.weight")), head[name])
    save_file(head, path / "model.safetensors", {"format": "pt"})


def turning_head(model: TinyModel, directory: Path) -> Drafting:
    """gpt-oss and an EAGLE-3 head that turns its last state, so that its first draft is the number after the next."""
    own, rotation = turning(model, directory / "turning", LENGTH)
    config = speculation("random-head", own)
    lm_head = load_file(own.path / "model.safetensors")["lm_head.weight"]
    turned = torch.cat((torch.zeros(len(rotation), 2 * len(rotation)), rotation), dim=1)
    without_layers(Path(config["model"]), fc=turned, lm_head=lm_head)
    return own, own.path, config


def own_layer(model: TinyModel, directory: Path) -> Drafting:
    """A MiMo model whose own layer hands on the token's embedding, so that a draft is the next number.

    All layers have a window; HF's Qwen 2 says so in other words than vLLM.
    """
    count = json.loads((model.path / "config.json").read_text())["num_hidden_layers"]
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * count}
    own, rotation = turning(model, directory / "windows", LENGTH, **window, max_window_layers=count)
    served = directory / "mimo"
    multi_token_prediction(own, served)
    without_layers(served, input_proj=torch.cat((torch.zeros_like(rotation), torch.eye(len(rotation))), dim=1))
    config = json.loads((own.path / "config.json").read_text())
    (own.path / "config.json").write_text(json.dumps(config | {"max_window_layers": 0}))
    return own, served, {"method": "mtp", "num_speculative_tokens": 2}


CASES: dict[str, tuple[str, Callable[..., Drafting]]] = {
    "EAGLE-3": ("gpt-oss", turning_head),
    "MTP": ("qwen2", own_layer),
}


@pytest.mark.parametrize("case", CASES)
def test_right_drafts_beside_windows(case: str, tiny_model: Any, tmp_path: Path) -> None:
    """Tokens are the reference's, where some drafts are right, some wrong, and prompts begin as others did."""
    name, make = CASES[case]
    model, served, config = make(tiny_model(name), tmp_path)
    prompts = random_prompts(85, [100, 60, 80])
    prompts += [prompts[0][:80] + prompts[1][:10]]
    with engine(served, enforce_eager=True, async_scheduling=True, speculative_config=config) as llm:
        for each in (prompts[:3], prompts[3:], prompts[:1]):
            for prompt, tokens in zip(each, tokens_of(generate(llm, each, greedy(40))), strict=True):
                assert tokens == model.greedy(prompt, 40)
        num_right = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        assert 20 < num_right < metric(llm, "vllm:spec_decode_num_draft_tokens")
        assert metric(llm, "vllm:prefix_cache_hits") > 0, "no prompt was in the cache"
