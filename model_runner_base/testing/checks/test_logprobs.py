"""Log-probabilities of output and prompt tokens: values, order, ranks, texts."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, sampled
from model_runner_base.testing.logprobs import RULES, check_all
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request

Start = Callable[..., LLM]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs(count: int, text_engine: Start, text_model: TinyModel) -> None:
    """logprobs=k gives the token's and the k most likely, by default of the raw logits."""
    params = [greedy(6, logprobs=count, detokenize=True), sampled(6, logprobs=count, seed=1, top_k=30)]
    check_all(text_engine(), text_model, [Request(random_prompts(1, [5])[0], p) for p in params])


def test_all_logprobs(text_engine: Start, text_model: TinyModel) -> None:
    """logprobs=-1 gives the whole vocabulary's."""
    check_all(text_engine(), text_model, [Request(random_prompts(2, [5])[0], sampled(3, logprobs=-1, seed=1))])


def test_different_counts_in_a_batch(text_engine: Start, text_model: TinyModel) -> None:
    """Requests with different counts, and with none, share a batch."""
    prompts = random_prompts(3, [4, 30, 70, 9, 12, 5])
    counts = [None, 0, 7, None, 2, 1]
    check_all(text_engine(), text_model, [Request(p, sampled(8, logprobs=c, seed=4)) for p, c in zip(prompts, counts)])  # noqa: B905


def test_raw_logprobs_are_before_the_rules(text_engine: Start, text_model: TinyModel) -> None:
    """logprobs are by default those before penalties, bias and temperature."""
    (prompt,) = random_prompts(4, [20])
    check_all(text_engine(), text_model, [Request(prompt, sampled(6, logprobs=3, **options)) for options in RULES])


@pytest.mark.parametrize("count", [0, 4, -1])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_prompt_logprobs(count: int, length: int, text_engine: Start, text_model: TinyModel) -> None:
    """prompt_logprobs=k gives those of every prompt token but the first."""
    (prompt,) = random_prompts(5, [length])
    check_all(text_engine(), text_model, [Request(prompt, greedy(2, prompt_logprobs=count, detokenize=True))])


@pytest.mark.parametrize("length", [65, 200])
def test_prompt_logprobs_of_chunks(length: int, text_engine: Start, text_model: TinyModel) -> None:
    """prompt_logprobs of a prompt longer than a step, among others."""
    prompts = random_prompts(6, [length, 5, 40])
    params = [
        greedy(4, prompt_logprobs=2, logprobs=1, detokenize=True),
        greedy(8),
        greedy(4, prompt_logprobs=0, detokenize=True),
    ]
    check_all(text_engine(), text_model, [Request(p, q) for p, q in zip(prompts, params, strict=True)])


def test_prompt_logprobs_with_prefix_cache(text_engine: Start, text_model: TinyModel) -> None:
    """prompt_logprobs are complete though the prompt's prefix is cached."""
    (prompt,) = random_prompts(7, [130])
    request = Request(prompt, greedy(2, prompt_logprobs=1, detokenize=True))
    llm = text_engine()
    generate(llm, [prompt], greedy(2))
    for _ in range(2):
        check_all(llm, text_model, [request])


def test_logprobs_after_preemption(text_engine: Start, text_model: TinyModel) -> None:
    """Logprobs of output and prompt are complete after preemption and resume."""
    llm = text_engine()
    before = metric(llm, "vllm:num_preemptions")
    params = greedy(80, logprobs=1, prompt_logprobs=0, detokenize=True)
    check_all(llm, text_model, [Request(prompt, params) for prompt in random_prompts(8, [60, 70, 80, 90])])
    check_preempted(llm, before)


def test_flat_logprobs(text_engine: Start, text_model: TinyModel) -> None:
    """flat_logprobs=True gives the same in vLLM's flat form."""
    (prompt,) = random_prompts(9, [10])
    params = sampled(6, logprobs=3, prompt_logprobs=2, flat_logprobs=True, seed=3)
    check_all(text_engine(), text_model, [Request(prompt, params)])
