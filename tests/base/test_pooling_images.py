"""Vectors of prompts with images equal those of HF transformers in float32, whatever chunks the images are cut into."""

from pathlib import Path

import pytest
import torch
from conftest import engine
from vllm import LLM

from model_runner_base.testing.checks.test_multimodal import Prompt, as_input, prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.images import SeeingModel, make_seeing_model
from model_runner_base.testing.pooling import TOLERANCE
from model_runner_base.testing.processed import reference


@torch.no_grad()
def vector_of(model: SeeingModel, prompt: Prompt) -> torch.Tensor:
    """The reference's normalised hidden state of the last token."""
    text, images = prompt
    whole, processor = reference(model.path)
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    return torch.nn.functional.normalize(whole.model(**inputs).last_hidden_state[0, -1], dim=-1)


def check(llm: LLM, asked: list[Prompt], wanted: list[torch.Tensor]) -> None:
    outputs = llm.embed([as_input(prompt) for prompt in asked], use_tqdm=False)
    for output, want in zip(outputs, wanted, strict=True):
        assert (torch.tensor(output.outputs.embedding) - want).abs().max() < TOLERANCE


def test_vectors_of_images_and_text(tmp_path: Path) -> None:
    """Prompts in one batch, in chunks that cut images; then each with a cached prefix."""
    model = make_seeing_model("qwen3-vl", tmp_path)
    asked = prompts(model)
    wanted = [vector_of(model, prompt) for prompt in asked]
    vectors = torch.stack(wanted)
    assert (vectors @ vectors.T - torch.eye(len(asked))).max() < 0.999, "images change nothing"
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 16, "enable_prefix_caching": True}
    options = {"runner": "pooling", "skip_tokenizer_init": False, "enforce_eager": True, **model.limits}
    with engine(model.path, **options, **limits) as llm:
        check(llm, asked, wanted)
        check(llm, asked[::-1], wanted[::-1])
        assert metric(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llava", {}, r"LlavaFor.* pools no images yet"),
        ("qwen3-vl", {"enable_lora": True}, r"adapters of Qwen3VLFor.* leave out enable_lora"),
    ],
)
def test_what_is_not_served_is_refused(family: str, options: dict[str, bool], words: str, tmp_path: Path) -> None:
    model = make_seeing_model(family, tmp_path)
    settings = {"runner": "pooling", "skip_tokenizer_init": False, "enforce_eager": True, **model.limits}
    with pytest.raises(ValueError, match=words), engine(model.path, **settings, **options):
        pass
