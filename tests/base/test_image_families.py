"""Every family of models that see, against HF transformers; the kit's row has what schedules do to three of them."""

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
from transformers import AutoTokenizer
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.attention.loops import FAR
from model_runner_base.multimodal.spans import ItemSpans
from model_runner_base.scheduling.whole_items import whole_items
from model_runner_base.step.batch import InputBatch
from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, prompts, read
from model_runner_base.testing.engine import greedy, runner_of
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
    limits = {"limit_mm_per_prompt": {"video": 0}} if "glm" in family else {}
    with engine(model.path, **OPTIONS, **limits) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]  # With a cached prefix each.


@pytest.mark.parametrize("family", ["internvl", "mistral3", "pixtral", "idefics3", "llama4"])
def test_an_image_at_every_place_of_a_chunk(family: str, make_model: Any) -> None:
    """In these prompts tokens of text belong to an image: a step may have nothing of it but those."""
    model: SeeingModel = make_model(family)
    asked = [("x" * count + f"{model.placeholder} b", [picture(count, 32, 32)]) for count in range(9, 18)]
    want = expected(model, asked)
    with engine(model.path, **OPTIONS, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        for prompt, answer in zip(asked, want, strict=True):
            assert read(ask(llm, [prompt])) == [answer]


@pytest.mark.parametrize("window", [24, 8])
def test_tokens_of_an_image_see_each_other(window: int, make_model: Any, tmp_path: Path) -> None:
    """Whatever a chunk begins with, in windows that are longer and shorter than an image; beside requests that decode,
    which leave less than an image's tokens of many a step."""
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
    """Pan and scan: what an image stands for is several runs of tokens, with text between them."""
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
    """It may cut an image."""
    options = OPTIONS | {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    with pytest.raises(ValueError, match="leave out scheduler_cls"), engine(make_model("gemma3").path, **options):
        pass


def test_an_image_that_is_cut_is_refused_by_the_runner(make_model: Any) -> None:
    item = SimpleNamespace(mm_position=PlaceholderRange(4, 6, torch.tensor([False, True, True, False, True, True])))
    requests: Any = SimpleNamespace(infos_of=lambda rows: [SimpleNamespace(items=[item])] * len(rows))

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
    """As many of the next tokens as there are without an item that goes on behind them."""
    places, end = [], 0
    for gap, length in items:
        places.append(PlaceholderRange(end + gap, length))
        end += gap + length
    if is_wrapped:  # Each in a token of text to both sides, which is also the next one's if that lies beside it.
        masks = [torch.tensor([False] + [True] * place.length + [False]) for place in places]
        places = [PlaceholderRange(p.offset - 1, p.length + 2, m) for p, m in zip(places, masks, strict=True)]
    request: Any = SimpleNamespace(mm_features=[SimpleNamespace(mm_position=place) for place in places])
    runs = [run for place in places for run in place.extract_embeds_range()]
    inner = {position for first, last in runs for position in range(first + 1, last + 1)}
    want = max(count for count in range(num_new + 1) if not count or num_computed + count not in inner)
    assert whole_items(request, num_computed, num_new) == want


def test_rows_given_up_in_a_step_of_no_tokens(make_model: Any) -> None:
    model: SeeingModel = make_model("llava")
    asked = prompts(model)[1:2]
    with engine(model.path, **OPTIONS) as llm:
        ask(llm, asked)
        runner = runner_of(llm)
        ((identifier, _),) = runner.encoder._rows._rows.items()
        step = SchedulerOutput.make_empty()
        step.preempted_req_ids, step.free_encoder_mm_hashes = set(), [identifier]
        runner.execute_model(step)
        assert identifier not in runner.encoder._rows


def test_weights_are_not_loaded_anew(make_model: Any) -> None:
    model: SeeingModel = make_model("llava")
    asked = prompts(model)[1:2]
    with engine(model.path, **OPTIONS) as llm:
        with pytest.raises(Exception, match="multimodal model cannot be loaded again"):
            llm.collective_rpc("reload_weights")
        assert read(ask(llm, asked)) == expected(model, asked)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "llava-onevision"])
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


def test_videos_that_are_refused(make_model: Any) -> None:
    model: SeeingModel = make_model("glm4v")
    words = "videos are not supported with Glm4vForConditionalGeneration yet"
    with pytest.raises(ValueError, match=words), engine(model.path, **OPTIONS):
        pass


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
