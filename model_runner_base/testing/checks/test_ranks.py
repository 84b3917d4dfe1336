"""Two ranks of tensor parallelism, which must agree on every token: one that draws another one spoils the other's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS
from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.server import post, wait_until_idle

LONGEST = DEFAULTS["max_model_len"]
PROMPTS = random_prompts(230, [9, 40, LONGEST - 12, 3])
"""Prompts of which the third reaches the longest context with 12 tokens."""
COUNT = 12


@pytest.fixture(scope="module")
def server(serve: Serve, pytestconfig: pytest.Config) -> Iterator[str]:
    if pytestconfig.getoption("ranks") < 2:
        raise NotImplementedError("ranks are not checked on one device: --ranks 2 says that there are two")
    with serve(tensor_parallel_size=2) as url:
        yield url


def ask(url: str, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """Tokens of an answer."""
    body = {"model": "kit", "prompt": list(prompt), "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    (choice,) = post(f"{url}/v1/completions", body | options)["choices"]
    assert len(choice["token_ids"]) == COUNT, f"{choice['finish_reason']} after {len(choice['token_ids'])} tokens"
    return choice["token_ids"]


def check(model: TinyModel, prompt: tuple[int, ...], tokens: list[int], **options: Any) -> None:
    """Checks each token of an answer against the reference, given those before it."""
    check_tokens(model, Request(prompt, SamplingParams(max_tokens=COUNT, **options)), tokens)


def test_greedy_tokens(server: str, text_model: TinyModel) -> None:
    """Requests at once, one of which ends at the longest context; then one alone, after the ranks were idle."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(lambda prompt: ask(server, prompt, temperature=0), PROMPTS)]
    wait_until_idle(server)
    answers.append(ask(server, PROMPTS[0], temperature=0))
    for prompt, answer in zip([*PROMPTS, PROMPTS[0]], answers, strict=True):
        check(text_model, prompt, answer, temperature=0)


def test_drawn_tokens(server: str, text_model: TinyModel) -> None:
    """Tokens that are drawn, with a seed and without, are the same on both ranks."""
    for seed in (None, 7):
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "seed": seed}
        for prompt in PROMPTS:
            check(text_model, prompt, ask(server, prompt, **options), **options)
