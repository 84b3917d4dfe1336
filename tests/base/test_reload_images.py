"""New weights in a running engine that has seen images: the next answers are the new checkpoint's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from lane import HAS_OPENXLA
from safetensors.torch import load_file, save_file

from model_runner_base.inputs.multimodal.towers.encoder_graphs import EncoderGraphs
from model_runner_base.models.loader import CheckpointError
from model_runner_base.testing.checks.test_multimodal import ask, expected, prompts, read
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.images import SeeingModel, make_seeing_model
from model_runner_base.testing.models import TinyModel

FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [256]}
COMPILED = {"additional_config": {"neuron_config": FEW_BUCKETS}, "max_model_len": 256}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False} | (COMPILED if HAS_OPENXLA else {"enforce_eager": True})
FAMILY = "llava-onevision" if HAS_OPENXLA else "qwen3-vl"
"""A family whose tower runs eagerly on the device of this lane, next to graphs on openxla."""


def other_weights(model: SeeingModel, directory: Path, left_out: str = "no tensor") -> SeeingModel:
    """A copy of a checkpoint with each weight somewhat changed, those of the towers too; without one tensor."""
    shutil.copytree(model.path, directory)
    torch.manual_seed(7)
    weights = load_file(directory / "model.safetensors")
    changed = {
        name: tensor + torch.randn_like(tensor) * tensor.std() if tensor.ndim > 1 else tensor
        for name, tensor in weights.items()
        if left_out not in name
    }
    assert left_out == "no tensor" or len(changed) == len(weights) - 1
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return SeeingModel(directory, model.placeholder)


def test_images_after_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that was encoded with the old weights is encoded anew, though the scheduler knows it as encoded."""
    old = make_seeing_model(FAMILY, tmp_path)
    new = other_weights(old, tmp_path / "new")
    part = other_weights(old, tmp_path / "part", "patch_embed.proj.bias" if FAMILY == "qwen3-vl" else "linear_1.bias")
    towers = [(name, tensor) for name, tensor in load_file(new.path / "model.safetensors").items() if "vis" in name]
    asked = prompts(old)
    shown = asked[1:2]  # Among many the outputs for its image would be given up before the next time.
    assert read_tokens(expected(old, asked)) != read_tokens(expected(new, asked))
    with engine(old.path, **OPTIONS, **old.limits) as llm:
        assert read(ask(llm, asked)) == expected(old, asked)
        for model, before in ((new, old), (old, new)):
            llm.reset_prefix_cache()
            assert read(ask(llm, shown)) == expected(before, shown)
            # In one process, an image has another identifier after a reload by path.
            reload_weights(llm, weights_iterator=list(load_file(model.path / "model.safetensors").items()))
            assert read(ask(llm, shown)) == expected(model, shown)
            assert read(ask(llm, asked)) == expected(model, asked)
        reload_weights(llm, weights_iterator=towers)
        assert read(ask(llm, asked[:1])) == expected(old, asked[:1])
        assert read(ask(llm, asked[1:])) != expected(old, asked[1:]), "the towers have their old weights"
        words = "towers of .* run as graphs on this device, .*; nothing was changed"
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=words):
            patch.setattr(runner_of(llm).encoder, "_graphs", EncoderGraphs())
            reload_weights(llm)
        with pytest.raises(CheckpointError, match=r"bias is missing, of shape .*keeps its weights"):
            reload_weights(llm, weights_path=str(part.path))
        assert read(ask(llm, asked[:1])) == expected(old, asked[:1])
        reload_weights(llm, weights_path=str(new.path))
        assert read(ask(llm, asked)) == expected(new, asked)


def test_a_reload_beside_a_draft(tmp_path: Path) -> None:
    """A draft has a checkpoint of its own, so its weights are not missing in the model's."""
    old = make_seeing_model(FAMILY, tmp_path)
    new = other_weights(old, tmp_path / "new")
    asked = prompts(old)[:2]
    config = speculation("head", TinyModel(old.path))
    with engine(old.path, **OPTIONS, **old.limits, speculative_config=config) as llm:
        assert read(ask(llm, asked)) == expected(old, asked)
        reload_weights(llm, weights_path=str(new.path))
        assert read(ask(llm, asked)) == expected(new, asked)


def read_tokens(answers: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [tokens for _, tokens in answers]


def reload_weights(llm: Any, **options: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs=options)
    llm.reset_prefix_cache()
