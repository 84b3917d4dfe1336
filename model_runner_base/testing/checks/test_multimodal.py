"""Images in prompts: tokens are the reference's, whatever else is in the batch, and images are encoded when needed.

One engine for each model serves all checks. It takes few tokens a step, so that images are cut into chunks where that
is allowed. It keeps few encoder outputs, so that they are evicted. Its KV cache holds 288 tokens, so that requests are
preempted.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import LLM, RequestOutput

from model_runner_base.inputs.pool import PoolRows
from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.engine import check_preempted, greedy, metric
from model_runner_base.testing.images import TOKEN_BYTES, SeeingModel, make_seeing_model, picture
from model_runner_base.testing.mismatch import check_same
from model_runner_base.testing.precision import PRECISION

Prompt = tuple[str, list[Image.Image]]
COUNT = 12


@pytest.fixture(scope="module", params=["llava", "qwen3-vl", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    """A vision model. The second one's rotary positions have height and width, its images have any size, and its tower
    adds to the first layers. In the third the tokens of an image see each other."""
    return make_seeing_model(request.param, tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def llm(engine: Callable[..., LLM], model: SeeingModel) -> LLM:
    options = model.limits | {"kv_cache_memory_bytes": 288 * TOKEN_BYTES}
    return engine(model.path, skip_tokenizer_init=False, max_num_batched_tokens=24, max_logprobs=-1, **options)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The items that were encoded, one after another, eagerly or by a graph."""
    seen: list[str] = []
    take = PoolRows.take

    def noting(rows: PoolRows, identifier: str, count: int) -> np.ndarray:
        seen.append(identifier)
        return take(rows, identifier, count)

    monkeypatch.setattr(PoolRows, "take", noting)
    return seen


def prompts(model: SeeingModel) -> list[Prompt]:
    """Text alone; a picture before, within and after text; several pictures; one that two prompts share."""
    one, other, wide = picture(1, 32, 32), picture(2, 40, 24), picture(3, 64, 48)
    see = model.placeholder
    return [
        ("no picture here", []),
        (f"{see} what is it?", [one]),
        (f"look at this: {see} and say what it is", [other]),
        (f"the last thing is {see}", [wide]),
        (f"{see} and {see} beside {see}: which is largest?", [one, wide, other]),
        ("a longer text without any picture, that goes on for a while and then ends", []),
    ]


def as_input(prompt: Prompt) -> Any:
    text, images = prompt
    return {"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {})


def ask(llm: LLM, asked: list[Prompt], count: int = COUNT, **rules: Any) -> list[RequestOutput]:
    return llm.generate([as_input(prompt) for prompt in asked], greedy(count, **rules), use_tqdm=False)


def read(outputs: list[RequestOutput]) -> list[tuple[list[int], list[int]]]:
    return [(list(out.prompt_token_ids or ()), list(out.outputs[0].token_ids)) for out in outputs]


def check_read(outputs: list[RequestOutput], want: list[tuple[list[int], list[int]]], where: str = "") -> None:
    """Compares prompts' tokens, which have places for images, and outputs."""
    got = read(outputs)
    prompts = [prompt for prompt, _ in want]
    assert [prompt for prompt, _ in got] == prompts, "prompts have other tokens, or places for images"
    names = [f"{where}prompt of {len(prompt)} tokens with its images" for prompt in prompts]
    check_same([tokens for _, tokens in got], [tokens for _, tokens in want], names, prompts)


def expected(model: SeeingModel, asked: list[Prompt], count: int = COUNT) -> list[tuple[list[int], list[int]]]:
    PRECISION.require_exact("tokens of prompts with images")
    return [model.greedy(text, images, count) for text, images in asked]


def test_tokens(llm: LLM, model: SeeingModel) -> None:
    """Prompts with and without images in one batch; then the same with a cached prefix each."""
    asked = prompts(model)
    want = expected(model, asked)
    assert len({tuple(tokens) for _, tokens in want}) == len(want)
    check_read(ask(llm, asked), want)
    check_read(ask(llm, asked[::-1]), want[::-1])


def test_log_probabilities(llm: LLM, model: SeeingModel) -> None:
    PRECISION.require_exact("log probabilities of prompts with images")
    asked = prompts(model)
    for (text, images), out in zip(asked, ask(llm, asked, logprobs=-1), strict=True):
        (completion,) = out.outputs
        want = model.log_probabilities(text, images, completion.token_ids)
        assert completion.logprobs is not None
        for place, row in zip(completion.logprobs, want, strict=True):
            assert place is not None
            got = [place[token].logprob for token in range(len(row))]
            np.testing.assert_allclose(got, row.numpy(), atol=2e-3)


def test_preemption(llm: LLM, model: SeeingModel) -> None:
    """A preempted request has its tokens at the same positions when it is resumed, those after an image too."""
    asked = [prompt for prompt in prompts(model) if len(prompt[1]) < 3]
    before = metric(llm, "vllm:num_preemptions")
    outputs = ask(llm, asked, 60, logprobs=0)
    check_read(outputs, expected(model, asked, 60))
    check_preempted(llm, before)
    for (text, images), out in zip(asked, outputs, strict=True):
        (completion,) = out.outputs
        # Stops before an image's placeholder in the output: the reference would look for its image.
        words = list(takewhile(lambda token: token < VOCAB_SIZE, completion.token_ids))
        want = model.log_probabilities(text, images, words)
        for token, place, row in zip(words, completion.logprobs or (), want, strict=False):
            assert place is not None and abs(place[token].logprob - float(row[token])) < 2e-3


def test_preemption_within_images(llm: LLM, model: SeeingModel) -> None:
    """Requests preempted after any step, also between two pieces of an image; a prompt has one image twice."""
    see, twice = model.placeholder, picture(30, 40, 40)
    asked = [(f"{see} and {see} again", [twice, twice]), (f"a {see}", [picture(31, 64, 64)])]
    want = expected(model, asked, 4)
    core, before = llm.llm_engine, metric(llm, "vllm:num_preemptions")
    for step in range(1, 9):
        llm.reset_prefix_cache()
        names = [f"preempted after step {step}, request {index}" for index in range(len(asked))]
        for name, prompt in zip(names, asked, strict=True):
            core.add_request(name, as_input(prompt), greedy(4))
        got: dict[str, Any] = {}
        for number in range(1, 100):
            got |= {output.request_id: output for output in core.step() if output.finished}
            if number == step:
                core.reset_prefix_cache(reset_running_requests=True)
            if not core.has_unfinished_requests():
                break
        for name, answer in zip(names, want, strict=True):
            assert name in got, f"{name} does not end"
            check_read([got[name]], [answer], f"{name}, ")
    check_preempted(llm, before)


def test_an_image_of_several_requests_is_encoded_once(llm: LLM, model: SeeingModel, encoded: list[str]) -> None:
    shared = picture(4, 48, 32)
    asked = [(f"{text} {model.placeholder}", [shared]) for text in ("this", "that", "which?")]
    check_read(ask(llm, asked), expected(model, asked))
    assert len(encoded) == 1


def test_images_that_were_evicted(llm: LLM, model: SeeingModel, encoded: list[str]) -> None:
    asked = [(f"see {model.placeholder}!", [picture(seed, 48, 48)]) for seed in range(10, 18)]
    want = expected(model, asked)
    check_read(ask(llm, asked), want)
    llm.reset_prefix_cache()
    check_read(ask(llm, asked), want)
    assert len(encoded) > len(asked)


def test_a_cached_prefix_that_ends_inside_an_image(llm: LLM, model: SeeingModel) -> None:
    see, images = model.placeholder, [picture(5, 64, 64), picture(6, 32, 32), picture(7, 32, 32)]
    asked = [(f"ab {see * 3}{text}", images) for text in ("", "?", " is it", " was")]
    want = expected(model, asked)
    for prompt, answer in zip(asked, want, strict=True):
        (out,) = ask(llm, [prompt])
        check_read([out], [answer])
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    assert out.num_cached_tokens and out.num_cached_tokens % block_size == 0


def test_an_image_whose_last_token_comes_alone(llm: LLM, model: SeeingModel) -> None:
    """A step may have an image's token as the only one of its prompt: alone, and with a request that decodes."""
    asked = [("x" * count + model.placeholder, [picture(20 + count, 32, 32)]) for count in range(7, 12)]
    want = expected(model, asked)
    for prompt, answer in zip(asked, want, strict=True):
        check_read(ask(llm, [prompt]), [answer])
    llm.reset_prefix_cache()
    check_read(ask(llm, asked), want)


def test_requests_that_are_aborted_leave_nothing(llm: LLM, model: SeeingModel) -> None:
    """Requests aborted while they wait for an encoder, between two chunks or while they decode leave nothing."""
    asked = prompts(model)
    want = expected(model, asked)
    for num_steps in range(1, 8):
        llm.reset_prefix_cache()
        for name, prompt in enumerate(asked):
            llm.llm_engine.add_request(f"{num_steps}-{name}", as_input(prompt), greedy(COUNT))
        for _ in range(num_steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request([f"{num_steps}-{name}" for name in range(len(asked))])
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    check_read(ask(llm, asked), want)
