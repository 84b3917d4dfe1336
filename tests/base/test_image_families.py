"""Families of models that see, against HF transformers; the kit runs three of them under many schedules."""

from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from failing import SEED, fail_admission
from lane import HAS_OPENXLA
from transformers import AutoTokenizer
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.testing.checks.test_multimodal import COUNT, as_input, ask, expected, prompts, read
from model_runner_base.testing.engine import greedy, runner_of
from model_runner_base.testing.images import FAMILIES, SeeingModel, make_seeing_model, picture, video_facts
from model_runner_base.testing.processed import hf

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True}
SHOWN_VIDEOS = ["qwen2-vl", "llava-onevision", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"]
if not HAS_OPENXLA:
    SHOWN_VIDEOS += ["qwen3.5", "glm4v", "glm4v-moe", "llava-next-video"]
TEXT_AROUND = ["internvl", "mistral3", "idefics3", "llama4"]
if HAS_OPENXLA:  # In what transformers 5 makes of the last one, two tokens are equally likely.
    TEXT_AROUND.append("pixtral")


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("seeing")
    return lambda name: make_seeing_model(name, directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_references(family: str, make_model: Any) -> None:
    model: SeeingModel = make_model(family)
    asked = prompts(model)
    want = expected(model, asked)
    with engine(model.path, **OPTIONS, **model.limits) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]  # With a cached prefix each.


@pytest.mark.parametrize("family", TEXT_AROUND)
def test_an_image_at_every_place_of_a_chunk(family: str, make_model: Any) -> None:
    """A step may have nothing of an image but tokens of text, which belong to the image in these prompts."""
    model: SeeingModel = make_model(family)
    asked = [("x" * count + f"{model.placeholder} b", [picture(count, 32, 32)]) for count in range(9, 18)]
    want = expected(model, asked)
    with engine(model.path, **OPTIONS, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        for prompt, answer in zip(asked, want, strict=True):
            assert read(ask(llm, [prompt])) == [answer]


def test_rows_given_up_in_a_step_of_no_tokens(make_model: Any) -> None:
    model: SeeingModel = make_model("llava")
    asked = prompts(model)[1:2]
    with engine(model.path, **OPTIONS) as llm:
        ask(llm, asked)
        runner = runner_of(llm)
        ((identifier, _),) = runner.encoder._pool_rows._rows.items()
        step = SchedulerOutput.make_empty()
        step.preempted_req_ids, step.free_encoder_mm_hashes = set(), [identifier]
        runner.execute_model(step)
        assert identifier not in runner.encoder._pool_rows


def test_what_a_request_that_fails_shares_with_others(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of a request that fails is encoded once by the scheduler, for all three that share it."""
    model: SeeingModel = make_model("llava")
    one, other, _ = prompts(model)[1:4]
    asked = [one, one, (f"and {model.placeholder} again", one[1]), other]
    with engine(model.path, **OPTIONS) as llm:
        fail_admission(llm, monkeypatch)
        params = [greedy(COUNT, seed=SEED), greedy(COUNT), greedy(COUNT), greedy(COUNT)]
        bad, *good = llm.generate([as_input(prompt) for prompt in asked], params, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert read(good) == expected(model, asked[1:])
        assert read(ask(llm, asked)) == expected(model, asked)


def released_positions(
    self: Any, input_ids: Any, mm_token_type_ids: Any, video_grid_thw: Any, second_per_grid_ts: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a prompt with a video in the released code of Qwen2-VL and Qwen2.5-VL, as in transformers 4: text
    begins after the largest position so far. In transformers 5 a video's length does not count."""
    ((times, height, width),) = video_grid_thw.tolist()
    seconds = [1] if second_per_grid_ts is None else second_per_grid_ts
    interval = getattr(self.config.vision_config, "tokens_per_second", 1) * seconds[0]
    frame = torch.stack(torch.meshgrid(*map(torch.arange, (times, height // 2, width // 2)), indexing="ij")).view(3, -1)
    frame[0] = (frame[0] * interval).long()
    positions, start = torch.zeros(3, 0), 0
    for is_video, group in groupby(mm_token_type_ids[0].tolist()):
        part = frame if is_video else torch.arange(len([*group])).expand(3, -1)
        positions = torch.cat((positions, part + start), 1)
        start = int(positions.max()) + 1
    return positions.long().unsqueeze(1), torch.tensor([[start - input_ids.shape[1]]])


@pytest.mark.parametrize("family", SHOWN_VIDEOS)
def test_video(family: str, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text after a video is where the released code has it, also after a video that is longer than it is wide."""
    if not HAS_OPENXLA:
        for each in (hf.Qwen2VLModel, hf.Qwen2_5_VLModel):
            monkeypatch.setattr(each, "get_rope_index", released_positions)
    model: SeeingModel = make_model(family)
    see = model.placeholder.replace("image", "video")
    sizes = ((1, 12), (9, 2))
    videos = [np.stack([np.array(picture(seed + n, 32, 32)) for n in range(count)]) for seed, count in sizes]
    texts = [f"{see} what moves?", f"this {see} is short"]
    want = [model.greedy_of_video(text, video, COUNT) for text, video in zip(texts, videos, strict=True)]
    facts = {"do_sample_frames": False, "video_backend": "opencv"}
    with engine(model.path, **OPTIONS) as llm:
        given = [(video, video_facts(video) | facts) if model.takes_times else video for video in videos]
        inputs: list[Any] = [
            {"prompt": text, "multi_modal_data": {"video": video}} for text, video in zip(texts, given, strict=True)
        ]
        assert read(llm.generate(inputs, greedy(COUNT), use_tqdm=False)) == want


@pytest.mark.skipif(not HAS_OPENXLA, reason="this release of vLLM counts the text between frames")
def test_videos_that_are_refused(make_model: Any) -> None:
    model: SeeingModel = make_model("glm4v")
    words = "videos are not supported with .*ForConditionalGeneration yet: set limit_mm_per_prompt"
    with pytest.raises(ValueError, match=words), engine(model.path, **OPTIONS):
        pass


def test_without_towers(make_model: Any) -> None:
    """A model without towers, where no image is allowed, serves text and refuses an image."""
    model: SeeingModel = make_model("qwen2-vl")
    text = [prompt for prompt in prompts(model) if not prompt[1]]
    with engine(model.path, **OPTIONS, limit_mm_per_prompt={"image": 0, "video": 0}) as llm:
        assert read(ask(llm, text)) == expected(model, text)
        with pytest.raises(ValueError, match=r"At most 0 image|not available for text-only models"):
            ask(llm, prompts(model)[1:2])
        assert read(ask(llm, text)) == expected(model, text)


def test_token_ids_beside_images(make_model: Any) -> None:
    """A prompt of token ids, one for each image, gives the tokens of the same prompt as text."""
    model: SeeingModel = make_model("llava")
    (text, images) = prompts(model)[2]
    ((_, want),) = expected(model, [(text, images)])
    ids = AutoTokenizer.from_pretrained(model.path)(text).input_ids
    with engine(model.path, **OPTIONS) as llm:
        inputs: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        (out,) = llm.generate(inputs, greedy(COUNT), use_tqdm=False)
        assert list(out.outputs[0].token_ids) == want
