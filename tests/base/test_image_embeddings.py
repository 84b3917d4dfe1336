"""Images given as the outputs of the model's tower (``enable_mm_embeds``), which the reference's tower computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compilations, engine
from PIL import Image

from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, prompts, read
from model_runner_base.testing.engine import greedy
from model_runner_base.testing.images import SeeingModel, make_seeing_model
from model_runner_base.testing.processed import reference

BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [256]}


def embeddings(model: SeeingModel, images: Sequence[Image.Image]) -> Any:
    """Data that vLLM takes in place of the images of a prompt."""
    seeing, processor = reference(model.path)
    inputs = processor.image_processor(list(images), return_tensors="pt")
    with torch.no_grad():
        if "image_grid_thw" in inputs:
            rows = seeing.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
            return {"image_embeds": torch.cat(list(rows)), "image_grid_thw": inputs["image_grid_thw"]}
        return torch.stack(list(seeing.model.get_image_features(inputs["pixel_values"])))


@pytest.mark.parametrize("has_tower", [True, False], ids=["beside images", "alone"])
@pytest.mark.parametrize(("family", "is_eager"), [("llava", True), ("llava", False), ("qwen2-vl", True)])
def test_tokens_are_those_of_the_images(family: str, is_eager: bool, has_tower: bool, tmp_path: Path) -> None:
    """The pool holds embeddings also where no image is allowed, in which case the model has no tower."""
    model = make_seeing_model(family, tmp_path)
    asked = prompts(model)
    want = expected(model, asked)
    given = [
        {"prompt": text} | ({"multi_modal_data": {"image": embeddings(model, images)}} if images else {})
        for text, images in asked
    ]
    options: dict[str, Any] = {"enforce_eager": True} if is_eager else {"additional_config": {"neuron_config": BUCKETS}}
    options |= {"skip_tokenizer_init": False, "max_model_len": 256, "enable_mm_embeds": True}
    limits = {} if has_tower else {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    with engine(model.path, **options, **limits) as llm:
        before = compilations()
        assert read(llm.generate(given, greedy(COUNT), use_tqdm=False)) == want
        if has_tower:
            assert read(ask(llm, asked)) == want
        assert compilations() == before
