"""Gemma 4's videos and sounds, and its larger sizes, in which tokens of an image see each other within windows.

Images of the smaller sizes are among the families of ``test_image_families.py``.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from lane import HAS_OPENXLA
from torch import nn

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.multimodal.layer_inputs import PerLayerEmbeddings
from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, read
from model_runner_base.testing.engine import greedy
from model_runner_base.testing.further_images import gemma4
from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture, video_facts
from model_runner_base.testing.processed import continued, make_processed_model
from model_runner_base.testing.sounds import SAMPLING_RATE, sound

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True}
VIDEO, SOUND = "<|video|>", "<|audio|>"

needs_gemma4 = pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no Gemma 4")


def film(seed: int, count: int) -> np.ndarray:
    """Frames [count, 32, 32, 3]."""
    return np.stack([np.array(picture(seed + frame, 32, 32)) for frame in range(count)])


def of_films(path: Path, asked: list[tuple[str, np.ndarray]]) -> tuple[list[Any], list[tuple[list[int], list[int]]]]:
    """Prompts with a video each, and the reference's tokens."""
    given: list[Any] = []
    want = []
    for text, frames in asked:
        facts = video_facts(frames)
        told = {"do_sample_frames": False, "video_metadata": [facts]}
        want.append(continued(path, COUNT, text=[text], videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], **told))
        video = frames, facts | {"do_sample_frames": False, "video_backend": "opencv"}
        given.append({"prompt": text, "multi_modal_data": {"video": video}})
    return given, want


@needs_gemma4
def test_tokens_of_an_image_see_each_other_within_windows(tmp_path: Path) -> None:
    """An image longer than the window, whatever a step begins with, and a video: tokens are the reference's."""
    family = partial(gemma4, use_bidirectional_attention="vision")
    model = SeeingModel(*make_processed_model("gemma4-windows", tmp_path, family))
    see = model.placeholder
    asked = [(f"{'x' * count}{see}{see} b", [picture(count, 32, 32), picture(30, 32, 16)]) for count in range(6)]
    want = expected(model, asked)
    films, want_of_films = of_films(
        model.path, [(f"{VIDEO} what moves?", film(1, 2)), (f"is {VIDEO} a film", film(9, 2))]
    )
    limits = {"image": 2, "audio": 0, "video": {"count": 1, "num_frames": 2}}
    with engine(model.path, **OPTIONS, max_num_batched_tokens=160, limit_mm_per_prompt=limits) as llm:
        assert read(ask(llm, asked)) == want
        assert read(ask(llm, asked[::-1])) == want[::-1]  # With a cached prefix each.
        assert read(llm.generate(films, greedy(COUNT), use_tqdm=False)) == want_of_films


@needs_gemma4
def test_videos_and_sounds(tmp_path: Path) -> None:
    """Videos and sounds of the smaller sizes, which cut them at will, beside each other."""
    model = make_seeing_model("gemma4", tmp_path)
    inputs, want = of_films(model.path, [(f"{VIDEO} what moves?", film(1, 4)), (f"this {VIDEO} is short", film(9, 2))])
    for text, seconds in ((f"{SOUND} what is it?", 0.4), (f"the last thing is {SOUND}", 1.1)):
        heard = sound(int(10 * seconds), seconds)
        want.append(continued(model.path, COUNT, text=[text], audio=[heard], sampling_rate=SAMPLING_RATE))
        inputs.append({"prompt": text, "multi_modal_data": {"audio": heard}})
    with engine(model.path, **OPTIONS) as llm:
        assert read(llm.generate(inputs, greedy(COUNT), use_tqdm=False)) == want


@pytest.mark.parametrize("calls_alike", [False, True])
def test_embeddings_for_each_layer(calls_alike: bool) -> None:
    """Tokens of items have those of token 0, and where calls have to be alike, all calls find them at one address."""
    table = torch.rand(9, 2, 3)
    text, model = nn.Module(), nn.Module()
    text.model = nn.Module()
    text.model.get_per_layer_inputs = lambda ids: table[ids]
    model.get_language_model = lambda: text
    model.per_layer_embeddings = torch.zeros(5, 2, 3)
    device_ops = DeviceOps(torch.device("cpu"))
    device_ops.calls_alike = calls_alike
    parts, places = PerLayerEmbeddings(model, 8, device_ops), []
    for ids, encoded, seen in (([1, 2, 3, 4], [0, 1, 1, 0], [1, 0, 0, 4]), ([5, 6], None, [5, 6])):
        parts.bind(torch.tensor(ids), None if encoded is None else torch.tensor(encoded).bool())
        assert model.per_layer_embeddings[: len(ids)].equal(table[seen])
        places.append(model.per_layer_embeddings.data_ptr())
        parts.unbind()
    assert (len({*places}) == 1) if calls_alike else model.per_layer_embeddings is None
