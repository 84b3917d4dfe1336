"""Every family of models that see, against HF transformers; the kit's row has what schedules do to two of them."""

from typing import Any

import numpy as np
import pytest
from conftest import engine
from transformers import AutoTokenizer

from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, prompts, read
from model_runner_base.testing.engine import greedy
from model_runner_base.testing.images import FAMILIES, SeeingModel, make_seeing_model, picture, video_facts

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True}


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("seeing")
    return lambda name: make_seeing_model(name, directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_references(family: str, make_model: Any) -> None:
    model: SeeingModel = make_model(family)
    asked = prompts(model)
    want = expected(model, asked)
    with engine(model.path, **OPTIONS) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]  # With a cached prefix each.


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "llava-onevision"])
def test_video(family: str, make_model: Any) -> None:
    model: SeeingModel = make_model(family)
    see = model.placeholder.replace("image", "video")
    videos = [np.stack([np.array(picture(seed + n, 32, 32)) for n in range(count)]) for seed, count in ((1, 4), (9, 2))]
    texts = [f"{see} what moves?", f"this {see} is short"]
    want = [model.greedy_of_video(text, video, COUNT) for text, video in zip(texts, videos, strict=True)]
    facts = {"do_sample_frames": False, "video_backend": "opencv"}
    with engine(model.path, **OPTIONS) as llm:
        given = [(video, video_facts(video) | facts) if model.tells_times else video for video in videos]
        inputs: list[Any] = [
            {"prompt": text, "multi_modal_data": {"video": video}} for text, video in zip(texts, given, strict=True)
        ]
        assert read(llm.generate(inputs, greedy(COUNT), use_tqdm=False)) == want


def test_without_towers(make_model: Any) -> None:
    """No image is allowed: text is served, an image is refused."""
    model: SeeingModel = make_model("qwen2-vl")
    text = [prompt for prompt in prompts(model) if not prompt[1]]
    with engine(model.path, **OPTIONS, limit_mm_per_prompt={"image": 0, "video": 0}) as llm:
        assert read(ask(llm, text)) == expected(model, text)
        with pytest.raises(ValueError, match="At most 0 image"):
            ask(llm, prompts(model)[1:2])
        assert read(ask(llm, text)) == expected(model, text)


def test_token_ids_beside_images(make_model: Any) -> None:
    """A prompt of token ids, one of which stands for each image."""
    model: SeeingModel = make_model("llava")
    (text, images) = prompts(model)[2]
    ((_, want),) = expected(model, [(text, images)])
    ids = AutoTokenizer.from_pretrained(model.path)(text).input_ids
    with engine(model.path, **OPTIONS) as llm:
        inputs: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        (out,) = llm.generate(inputs, greedy(COUNT), use_tqdm=False)
        assert list(out.outputs[0].token_ids) == want
