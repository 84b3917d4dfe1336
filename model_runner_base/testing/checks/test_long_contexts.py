"""Contexts of 600 to 2,500 tokens, whose attention is merged from many parts, in chunks and in decode."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, check_hit, generate, greedy, tokens_of
from model_runner_base.testing.logprobs import check_all
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request

LONGEST = 2560
PROMPTS = random_prompts(170, [600, 1023, 1500, 2500])
OPTIONS: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": LONGEST},
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": False,
}
COUNT = 16


@pytest.fixture
def llm(engine: Callable[..., LLM], text_model: TinyModel) -> LLM:
    """An engine whose cache holds two of the longest requests, and not quite all four of the first check."""
    return engine(text_model.path, kv_cache_memory_bytes=cache_bytes(text_model.path, 5632), **OPTIONS)


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = COUNT) -> list[int]:
    outputs = generate(llm, prompts, greedy(count))
    check_equal(model, prompts, tokens_of(outputs), [count] * len(prompts))
    return [output.num_cached_tokens or 0 for output in outputs]


def test_long_prompts(llm: LLM, text_model: TinyModel) -> None:
    """Prompts in chunks of hundreds of tokens, with requests that decode with contexts of other lengths."""
    check(llm, text_model, PROMPTS)


def test_decodes_past_powers_of_two(llm: LLM, text_model: TinyModel) -> None:
    """Log probabilities of decodes whose contexts grow past 512, 1,024 and 2,048 tokens."""
    prompts = random_prompts(172, [506, 507, 1018, 2042])
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    check_all(llm, text_model, [Request(prompt, params) for prompt in prompts])


def test_a_long_prefix_hit(llm: LLM, text_model: TinyModel) -> None:
    """A prompt that begins with 1,500 cached tokens, and its answer."""
    (end,) = random_prompts(171, [40])
    check(llm, text_model, [PROMPTS[2]])
    (cached,) = check(llm, text_model, [PROMPTS[2] + end])
    check_hit(cached > 1400)


def test_the_longest_context(llm: LLM, text_model: TinyModel) -> None:
    """A request that grows to the longest context, whose last tokens still see the first."""
    prompt = PROMPTS[3]
    check(llm, text_model, [prompt], LONGEST - len(prompt))
