"""Multimodal families that are in no list: served with a warning if what they need is tested, else refused by need."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import engine
from lane import HAS_OPENXLA
from torch import nn

from model_runner_base.admission import multimodal_limits
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.multimodal.encoder import check_outputs, check_tower_layers
from model_runner_base.testing.checks.test_multimodal import ask, expected, prompts, read
from model_runner_base.testing.further_images import glm
from model_runner_base.testing.images import SeeingModel
from model_runner_base.testing.processed import TEXT, Family, hf, make_processed_model
from model_runner_base.vllm_compat.probes.multimodal_class import need_of

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True}


def glm_ocr() -> Family:
    """A family of M-RoPE, with norms in its tower, that is in no list."""
    # vLLM takes the width of a layer of the tower from the text model, of which it is as wide in published checkpoints.
    return glm(hf.GlmOcrConfig, {"attention_bias": False, "intermediate_size": 3 * TEXT["hidden_size"]})


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no GLM-OCR")
def test_images_of_an_untried_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures among text give the tokens of HF transformers, and the log says that they were not compared."""
    said: list[str] = []
    monkeypatch.setattr(multimodal_limits.logger, "warning_once", lambda text, *names: said.append(text % names))
    model = SeeingModel(*make_processed_model("glm-ocr", tmp_path, glm_ocr))
    assert "GlmOcrForConditionalGeneration" not in multimodal_limits.MULTIMODAL_ARCHITECTURES
    asked = prompts(model)
    want = expected(model, asked)
    with engine(model.path, **OPTIONS) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]  # With a cached prefix each.
    message = (
        "Images, videos and sounds of GlmOcrForConditionalGeneration were not compared with another implementation."
    )
    assert {*said} == {message}


NEEDS = [
    ("ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration", "an embed_input_ids of its own"),
    ("voxtral_realtime.VoxtralRealtimeGeneration", "it reads the ids of tokens"),
    ("gemma3n_mm.Gemma3nForConditionalGeneration", "an embed_input_ids of its own"),
    ("transformers.TransformersMultiModalForCausalLM", "Transformers backend"),
    ("qwen2_vl.Qwen2VLForConditionalGeneration", None),
    ("qwen3_vl.Qwen3VLForConditionalGeneration", None),
    ("llava_next.LlavaNextForConditionalGeneration", None),
    ("interns1.InternS1ForConditionalGeneration", None),
    ("aria.AriaForConditionalGeneration", None),
]
"""Classes of vLLM in both lanes, and what they need that was not tried."""


@pytest.mark.parametrize(("name", "need"), NEEDS)
def test_need_of_a_class(name: str, need: str | None) -> None:
    """A family is refused with the property that was not tried, and never served with wrong tokens."""
    module, _, class_name = name.partition(".")
    found = need_of(getattr(import_module(f"vllm.model_executor.models.{module}"), class_name))
    assert found is None if need is None else need in str(found)


def test_needs_that_a_class_only_names() -> None:
    """Properties that few classes have, or that one release has alone."""
    embeds = import_module("vllm.model_executor.models.interfaces").SupportsMultiModal.embed_input_ids
    common: dict[str, Any] = {"embed_input_ids": embeds}
    for name, need in (
        ("supports_multimodal_raw_input_only", "ids of tokens"),
        ("supports_realtime", "while it runs"),
        ("requires_sequential_video_encoding", "a video at a time"),
    ):
        assert need in str(need_of(type("Model", (), common | {name: True})))
    assert need_of(type("Model", (), common)) is None


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()


class Model(nn.Module):
    supports_multimodal = True
    _tower_model_names = ("tower",)

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.text = nn.Identity()


def test_towers_that_would_give_wrong_tokens_end_the_start() -> None:
    """A layer of a tower that waits for a step's metadata would return zeros; wide outputs would be cut."""
    model = Model()
    layers = {"tower.layer": model.tower.layer}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"text": model.text}))
    check_tower_layers(config, model)
    config.compilation_config.static_forward_context |= layers
    with pytest.raises(UnsupportedConfigError, match="layer layer of its Tower needs the attention metadata"):
        check_tower_layers(config, model)
    check_outputs(model, [torch.zeros(3, 8)], 8)
    with pytest.raises(UnsupportedConfigError, match="make rows of 16 numbers, and its text model takes 8"):
        check_outputs(model, [torch.zeros(3, 16)], 8)
