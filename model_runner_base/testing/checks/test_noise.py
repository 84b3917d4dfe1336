"""Drawn tokens at the ends of the random numbers' range, and under load."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from model_runner_base.heads.sampling.sampler import gumbel_noise
from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, sampled, tokens_of
from model_runner_base.testing.mismatch import check_same
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
PROMPT = random_prompts(20, [4])[0]
NUM_PLAIN = 200
"""Seeds of no special noise."""
LIKELIEST: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
"""Parameters that leave the likeliest token alone."""


@cache
def extreme_seeds(likeliest: int) -> list[int]:
    """Seeds with which a token after ``PROMPT`` gets the largest noise there is, or the likeliest the smallest."""
    found: list[int] = []
    position = torch.full((1,), len(PROMPT), dtype=torch.int32)
    largest, smallest = [], []
    for start in range(0, 60_000, 4000):
        seeds = torch.arange(start, start + 4000, dtype=torch.int32)
        noise = gumbel_noise(seeds, torch.zeros_like(seeds), position.expand(len(seeds)), VOCAB_SIZE)
        largest.append(noise.amax(dim=1))
        smallest.append(noise[:, likeliest])
    for values, count in ((torch.cat(largest), 6), (-torch.cat(smallest), 6)):
        found += values.topk(count).indices.tolist()
    return found


@pytest.mark.parametrize("options", LIKELIEST, ids=str)
def test_likeliest_token(options: dict[str, Any], text_engine: Start, text_model: TinyModel) -> None:
    """top_k=1, the smallest top_p and min_p=1 give the greedy token, whatever the noise, at its ends too."""
    (greedy_token,) = text_model.greedy(PROMPT, 1)
    seeds = [*extreme_seeds(greedy_token), *range(NUM_PLAIN)]
    llm = text_engine()
    for temperature in (1.0, 2.0):
        params = [sampled(1, seed=seed, temperature=temperature, **options) for seed in seeds]
        got = tokens_of(generate(llm, [PROMPT] * len(seeds), params))
        names = [f"{text_model.path.name}, temperature={temperature}, {options}, seed={seed}" for seed in seeds]
        hint = "random numbers of 0 or 1 may be drawn as noise"
        check_same(got, [[greedy_token]] * len(seeds), names, [PROMPT] * len(seeds), hint)


def test_ids_under_load(text_engine: Start) -> None:
    """Ids that are drawn under load are in the vocabulary, and those of a seed are the same twice."""
    lengths = np.random.default_rng(5).integers(1, 60, 40).tolist()
    prompts = random_prompts(62, lengths)
    params = [sampled(2 + 3 * (i % 7), seed=i, temperature=1.5) for i in range(len(prompts))]
    first, second = (tokens_of(generate(text_engine(), prompts, params)) for _ in range(2))
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        wrong = [token for token in one + two if not 0 <= token < VOCAB_SIZE]
        case = f"request {number} of {len(prompts)}"
        assert not wrong, f"{case}: ids {wrong} are not in the vocabulary of {VOCAB_SIZE}"
        check_same([two], [one], [f"{case}, seed={number}, the second time"], [prompts[number]])
