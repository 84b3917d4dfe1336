"""Models whose tokens of an image see each other, so that a step has an image whole: Gemma 3."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import PlaceholderRange

from model_runner_base.attention.plan import FAR
from model_runner_base.inputs.multimodal.positions import ItemSpans
from model_runner_base.scheduling.corrections.bidirectional_images import without_cut_image
from model_runner_base.step.batch import InputBatch
from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, read
from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture
from model_runner_base.vllm_compat.probes.multimodal import SEES_BEFORE_WINDOW

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True}


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("seeing")
    return lambda name: make_seeing_model(name, directory)


@pytest.mark.parametrize("window", [24, 8] if SEES_BEFORE_WINDOW else [24])
def test_tokens_of_an_image_see_each_other(window: int, make_model: Any, tmp_path: Path) -> None:
    """Tokens are the reference's whatever a chunk begins with, in windows longer and shorter than an image. Requests
    that decode meanwhile leave less than an image's tokens of many a step."""
    model = SeeingModel(tmp_path / "model", make_model("gemma3").placeholder)
    shutil.copytree(make_model("gemma3").path, model.path)
    config = json.loads((model.path / "config.json").read_text())
    config["text_config"]["sliding_window"] = window
    (model.path / "config.json").write_text(json.dumps(config))
    see = model.placeholder
    asked = [(f"{'x' * count}{see}{see} b", [picture(count, 32, 32), picture(30, 32, 32)]) for count in range(6)]
    want = expected(model, asked)
    cached = {"enable_prefix_caching": window > 16}
    with engine(model.path, **OPTIONS, max_num_batched_tokens=24, **cached) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]


def test_crops_of_an_image_are_apart(make_model: Any) -> None:
    """An image under pan and scan is several runs of tokens, with text between them."""
    model: SeeingModel = make_model("gemma3")
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 2}
    text, images = f"{model.placeholder} is wide", [picture(1, 64, 32)]
    tokens, want = model.greedy(text, images, COUNT, **crops)
    beside = f"{model.placeholder}{model.placeholder}", [*images, picture(2, 32, 32)]
    want_beside = model.greedy(*beside, COUNT, **crops)
    # The least that holds an item with its crops: what the next one shares a token with.
    with engine(model.path, **OPTIONS, mm_processor_kwargs=crops, max_num_batched_tokens=160) as llm:
        assert read(ask(llm, [(text, images), beside])) == [(tokens, want), want_beside]
    assert tokens.count(tokens[-20]) > 0 and len(tokens) > 3 * 16


def test_another_scheduler_is_refused(make_model: Any) -> None:
    """A scheduler other than ours is refused, since it may cut an image."""
    options = OPTIONS | {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    with pytest.raises(ValueError, match="leave out scheduler_cls"), engine(make_model("gemma3").path, **options):
        pass


def test_an_image_that_is_cut_is_refused_by_the_runner(make_model: Any) -> None:
    """A sound at another place is none of the spans."""
    place = PlaceholderRange(4, 6, torch.tensor([False, True, True, False, True, True]))
    items = [
        SimpleNamespace(modality="image", mm_position=place),
        SimpleNamespace(modality="audio", mm_position=PlaceholderRange(9, 20)),
    ]
    requests: Any = SimpleNamespace(infos_of=lambda rows: [SimpleNamespace(items=items)] * len(rows))

    def spans(start: int, end: int) -> tuple[list[int], list[int]]:
        lens = np.array([end - start])
        batch = InputBatch(
            ["a"],
            end - start,
            np.zeros(1, int),
            lens,
            lens - lens,
            lens - lens + start,
            lens + start,
            np.ones(1, bool),
            1,
            0,
        )
        first, last = ItemSpans(requests).of_chunks(batch)
        return first.tolist(), last.tolist()

    assert spans(3, 10) == ([FAR, FAR, 5, 5, FAR, 8, 8], [-1, -1, 6, 6, -1, 9, 9])
    assert spans(6, 8) == ([5, FAR], [6, -1])
    for start, end in ((0, 6), (5, 6), (7, 9), (9, 9)):
        if end > start:
            with pytest.raises(RuntimeError, match="cut an image"):
                spans(start, end)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=4),
    st.integers(0, 30),
    st.integers(1, 30),
    st.booleans(),
)
def test_a_step_takes_images_whole(
    items: list[tuple[int, int]], num_computed: int, num_new: int, is_wrapped: bool
) -> None:
    """A step takes as many of the next tokens as it can without ending inside an item."""
    places, end = [], 0
    for gap, length in items:
        places.append(PlaceholderRange(end + gap, length))
        end += gap + length
    if is_wrapped:  # Each between two tokens of text; the next one shares a token if it follows at once.
        masks = [torch.tensor([False] + [True] * place.length + [False]) for place in places]
        places = [PlaceholderRange(p.offset - 1, p.length + 2, m) for p, m in zip(places, masks, strict=True)]
    request: Any = SimpleNamespace(mm_features=[SimpleNamespace(mm_position=place) for place in places])
    runs = [run for place in places for run in place.extract_embeds_range()]
    inner = {position for first, last in runs for position in range(first + 1, last + 1)}
    want = max(count for count in range(num_new + 1) if not count or num_computed + count not in inner)
    assert without_cut_image(request, num_computed, num_new) == want
