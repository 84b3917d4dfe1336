"""Drawn tokens follow the documented distribution, over seeds and over positions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, sampled, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.reference import Request, distribution
from model_runner_base.testing.statistics import check_counts

Start = Callable[..., LLM]
PROMPT = random_prompts(20, [4])[0]


@pytest.fixture
def draws(pytestconfig: pytest.Config) -> int:
    """The number of tokens, each with a seed of its own; 2,000 unless ``--draws`` says otherwise."""
    count: int = pytestconfig.getoption("draws")
    return count


def draw(llm: LLM, count: int, seeds: Sequence[int | None], options: dict[str, Any]) -> np.ndarray:
    """Tokens [seeds, count]."""
    PRECISION.require_exact("shares of drawn tokens")
    return np.array(tokens_of(generate(llm, [PROMPT] * len(seeds), [sampled(count, seed=s, **options) for s in seeds])))


def check(llm: LLM, model: TinyModel, seeds: Sequence[int | None], options: dict[str, Any]) -> None:
    request = Request(PROMPT, sampled(1, **options))
    tokens = draw(llm, 1, seeds, options)
    counts = np.bincount(tokens[:, 0], minlength=VOCAB_SIZE)
    check_counts(counts, distribution(model, request), request)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_distribution(options: dict[str, Any], text_engine: Start, text_model: TinyModel, draws: int) -> None:
    """One token drawn with each of many seeds follows temperature, top_k, top_p and min_p."""
    check(text_engine(), text_model, range(draws), options)


def test_distribution_under_penalties(text_engine: Start, text_model: TinyModel, draws: int) -> None:
    """One token drawn with each of many seeds follows a penalty, bias and allowed tokens."""
    options = {"repetition_penalty": 2.0, "logit_bias": {7: 4.0}, "allowed_token_ids": list(range(3, 100))}
    check(text_engine(), text_model, range(draws), options)


def test_seeds_that_differ_in_high_bits(text_engine: Start, text_model: TinyModel, draws: int) -> None:
    """Seeds that differ only above their lowest 32 bits are different seeds."""
    check(text_engine(), text_model, [1 + (i << 32) for i in range(draws)], {"top_k": 8})


def test_without_seed(text_engine: Start, text_model: TinyModel, draws: int) -> None:
    """Requests without a seed follow the distribution too."""
    check(text_engine(), text_model, [None] * draws, {"top_k": 8})


def test_positions_are_independent(text_engine: Start, text_model: TinyModel, draws: int) -> None:
    """The first two tokens of a seed are drawn independently."""
    # Both tokens are drawn from the same few, so that noise that is used twice would show.
    options: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": [10, 20, 30, 40]}
    request = Request(PROMPT, sampled(2, **options))
    first = distribution(text_model, request)
    of_pairs = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for token in np.flatnonzero(first):
        of_pairs[token] = first[token] * distribution(text_model, request, [int(token)])
    tokens = draw(text_engine(), 2, range(draws), options)
    counts = np.zeros_like(of_pairs)
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    check_counts(counts.ravel(), of_pairs.ravel(), request)
