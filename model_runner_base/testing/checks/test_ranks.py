"""Two ranks of tensor parallelism, which must agree on every token: one that draws another one spoils the other's."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS
from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processes import COUNT, ask, ask_all, kill, serving
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.server import wait_until_idle

LONGEST = DEFAULTS["max_model_len"]
PROMPTS = random_prompts(230, [9, 40, LONGEST - 12, 3])
"""Prompts of which the third reaches the longest context with 12 tokens."""


@pytest.fixture(scope="module")
def server(serve: Serve, pytestconfig: pytest.Config) -> Iterator[str]:
    with serving(serve, "ranks", pytestconfig, tensor_parallel_size=2) as url:
        yield url


def check(model: TinyModel, prompt: tuple[int, ...], tokens: list[int], **options: Any) -> None:
    """Checks each token of an answer against the reference, given those before it."""
    check_tokens(model, Request(prompt, SamplingParams(max_tokens=COUNT, **options)), tokens)


def test_greedy_tokens(server: str, text_model: TinyModel) -> None:
    """Requests at once, one of which ends at the longest context; then one alone, after the ranks were idle."""
    answers = ask_all(server, PROMPTS, "two ranks, requests at once", temperature=0)
    wait_until_idle(server)
    answers.append(ask(server, PROMPTS[0], "two ranks, a request alone", temperature=0))
    for prompt, answer in zip([*PROMPTS, PROMPTS[0]], answers, strict=True):
        check(text_model, prompt, answer, temperature=0)


def test_drawn_tokens(server: str, text_model: TinyModel) -> None:
    """Tokens that are drawn, with a seed and without, are the same on both ranks."""
    for seed in (None, 7):
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "seed": seed}
        for prompt in PROMPTS:
            check(text_model, prompt, ask(server, prompt, "two ranks", **options), **options)


def test_a_killed_rank(server: str) -> None:
    """A rank that is killed ends all requests with an error, and the server with all of its processes."""
    kill(server, "Worker_TP1", PROMPTS[:3])
