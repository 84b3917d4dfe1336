"""Sounds in prompts: tokens are HF transformers', whatever the sounds' lengths and however a step cuts them.

One engine of 24 tokens a step serves all tests, so most sounds are cut.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import engine
from vllm import LLM

from model_runner_base.testing.checks.test_multimodal import read
from model_runner_base.testing.engine import greedy, runner_of
from model_runner_base.testing.sounds import SAMPLING_RATE, HearingModel, make_hearing_model, sound

Prompt = tuple[str, list[np.ndarray]]
COUNT = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HearingModel:
    return make_hearing_model("qwen2-audio", tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def llm(model: HearingModel) -> Iterator[LLM]:
    with engine(model.path, skip_tokenizer_init=False, enforce_eager=True, max_num_batched_tokens=24) as llm:
        yield llm


def ask(llm: LLM, asked: list[Prompt]) -> list[tuple[list[int], list[int]]]:
    inputs: list[Any] = [
        {"prompt": text} | ({"multi_modal_data": {"audio": sounds}} if sounds else {}) for text, sounds in asked
    ]
    return read(llm.generate(inputs, greedy(COUNT), use_tqdm=False))


def expected(model: HearingModel, asked: list[Prompt]) -> list[tuple[list[int], list[int]]]:
    return [model.greedy(text, sounds, COUNT) for text, sounds in asked]


def test_tokens(llm: LLM, model: HearingModel) -> None:
    """Prompts with and without sounds give the reference's tokens in one batch, and again with a cached prefix each."""
    hear = model.placeholder
    asked: list[Prompt] = [
        ("no sound here", []),
        (f"{hear} what is it?", [sound(1, 0.3)]),
        (f"the last thing is {hear}", [sound(2, 1.5)]),
        (f"{hear} and {hear} beside {hear}: which is longest?", [sound(3, 0.1), sound(4, 1.0), sound(5, 0.4)]),
    ]
    want = expected(model, asked)
    assert len({tuple(tokens) for _, tokens in want}) == len(want)
    assert ask(llm, asked) == want
    assert ask(llm, asked[::-1]) == want[::-1]


def test_a_sound_of_several_requests_is_encoded_once(
    llm: LLM, model: HearingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = runner_of(llm).model.embed_multimodal

    def noting(**kwargs: Any) -> Any:
        outputs = encode(**kwargs)
        seen.append(len(outputs))
        return outputs

    monkeypatch.setattr(runner_of(llm).model, "embed_multimodal", noting)
    shared = sound(6, 0.4)
    asked = [(f"{text} {model.placeholder}", [shared]) for text in ("this", "that", "which?")]
    assert ask(llm, asked) == expected(model, asked)
    assert seen == [1]


def test_a_cached_prefix_that_ends_inside_a_sound(llm: LLM, model: HearingModel) -> None:
    asked = [(f"ab {model.placeholder}{text}", [sound(7, 1.2)]) for text in ("", "?", " is it")]
    want = expected(model, asked)
    assert [ask(llm, [prompt]) for prompt in asked] == [[answer] for answer in want]


def test_a_sound_with_its_sampling_rate(llm: LLM, model: HearingModel) -> None:
    asked: list[Any] = [(f"{model.placeholder} now", [(sound(8, 0.4), SAMPLING_RATE)])]
    assert ask(llm, asked) == expected(model, [(asked[0][0], [sound(8, 0.4)])])


def test_a_sound_too_short_to_be_heard(llm: LLM, model: HearingModel) -> None:
    with pytest.raises(ValueError, match="too short"):
        ask(llm, [(f"{model.placeholder}?", [sound(9, 0.01)])])
    asked: list[Prompt] = [(f"{model.placeholder}?", [sound(9, 0.1)])]
    assert ask(llm, asked) == expected(model, asked)
