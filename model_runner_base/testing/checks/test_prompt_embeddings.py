"""Prompts given as embeddings: tokens are those of the same prompts given as ids."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, check_hit, check_preempted, greedy, metric, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, reference_model

PROMPTS = random_prompts(70, [1, 7, 33, 64, 90, 130])
NEW_TOKENS = 20


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture
def llm(engine: Callable[..., LLM], model: TinyModel) -> LLM:
    return engine(model.path, **options_of(model))


def options_of(model: TinyModel) -> dict[str, Any]:
    """Options of an engine whose cache holds less than four of the requests need, so that some are preempted."""
    return {"enable_prompt_embeds": True, "kv_cache_memory_bytes": cache_bytes(model.path, 288)}


@torch.no_grad()
def embeddings(model: TinyModel, prompt: Sequence[int]) -> torch.Tensor:
    """Embeddings [P, H] of a prompt's tokens."""
    rows: torch.Tensor = reference_model(model.path).get_input_embeddings()(torch.tensor(prompt))
    return rows


def check(llm: LLM, model: TinyModel, asked: list[Any], prompts: Sequence[tuple[int, ...]], count: int) -> None:
    given = dict(zip(prompts, asked, strict=True))

    def run(llm: LLM, prompts: Sequence[tuple[int, ...]], counts: Sequence[int]) -> list[list[int]]:
        """Runs prompts as they were given; one that a search made shorter is one of ids."""
        inputs = [given.get(prompt, {"prompt_token_ids": list(prompt)}) for prompt in prompts]
        return tokens_of(llm.generate(inputs, [greedy(count) for count in counts], use_tqdm=False))

    counts = [count] * len(prompts)
    check_equal(model, prompts, run(llm, prompts, counts), counts, run)


def test_embeddings(llm: LLM, model: TinyModel) -> None:
    """Prompts of embeddings next to prompts of ids: in chunks, with a cached prefix, preempted and resumed."""
    for first in (0, 1):
        asked: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        asked[first::2] = [{"prompt_embeds": embeddings(model, prompt)} for prompt in PROMPTS[first::2]]
        check(llm, model, asked, PROMPTS, NEW_TOKENS)
    hits, preemptions = metric(llm, "vllm:prefix_cache_hits"), metric(llm, "vllm:num_preemptions")
    for _ in range(2):
        check(llm, model, asked[5:], PROMPTS[5:], NEW_TOKENS)
    is_hit = metric(llm, "vllm:prefix_cache_hits") > hits
    long = random_prompts(71, [60, 70, 80, 90])
    check(llm, model, [{"prompt_embeds": embeddings(model, prompt)} for prompt in long], long, 60)
    check_hit(is_hit)
    check_preempted(llm, preemptions)
