"""Multimodal models with text alone: where every limit of ``limit_mm_per_prompt`` is 0, they are models of text."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import engine
from lane import HAS_OPENXLA

from model_runner_base.testing.architectures import GEMMA4
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture
from model_runner_base.testing.models import vary
from model_runner_base.testing.processed import TOWER

OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    "max_num_batched_tokens": 16,
    "enforce_eager": True,
}
TEXTS = ["no picture here", "a longer text without any picture, that goes on for a while and then ends", "x"]
hf: Any = transformers


@pytest.mark.parametrize("family", ["gemma3", "qwen3-vl"])
def test_tokens_are_the_references(family: str, tmp_path: Path) -> None:
    """Families of several cache groups, and of three positions a token; an image is the request's error."""
    model: SeeingModel = make_seeing_model(family, tmp_path)
    with engine(model.path, **OPTIONS, skip_tokenizer_init=False) as llm:
        want = [model.greedy(text, [], 12) for text in TEXTS]
        got = generate(llm, [prompt for prompt, _ in want], greedy(12))
        assert tokens_of(got) == [tokens for _, tokens in want]
        with pytest.raises(ValueError, match=r"image|text-only"):
            llm.generate(
                {"prompt": model.placeholder, "multi_modal_data": {"image": picture(1, 32, 32)}}, use_tqdm=False
            )


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no Gemma 4")
def test_a_family_of_two_head_sizes(tmp_path: Path) -> None:
    vision = hf.Gemma4VisionConfig(**TOWER, num_key_value_heads=4, head_dim=8, position_embedding_size=64)
    text = hf.Gemma4TextConfig(**GEMMA4)
    config = hf.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, tie_word_embeddings=False)
    torch.manual_seed(3)
    model = hf.Gemma4ForConditionalGeneration._from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vary(name, parameter)
    model.save_pretrained(tmp_path)
    prompts = random_prompts(20, [3, 40, 90])
    with engine(tmp_path, **OPTIONS, max_model_len=256) as llm:
        got = tokens_of(generate(llm, prompts, greedy(12)))
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokens == want[0, len(prompt) :].tolist()
    assert len({token for tokens in got for token in tokens}) > 10, "the tokens are not diverse"
