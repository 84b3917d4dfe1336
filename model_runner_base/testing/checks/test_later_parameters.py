"""Parameters of later releases of vLLM, under the contract of its second model runner: thinking budgets, log
probabilities of chosen tokens, and logits processors that keep their state by slots."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm import LLM, envs

from model_runner_base.heads.sampling.thinking_budget import markers_of
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, sampled, tokens_of
from model_runner_base.testing.logprobs import check_chosen
from model_runner_base.testing.mismatch import check_same
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processors import favour, keep_top, never_again
from model_runner_base.testing.reference import Request
from model_runner_base.testing.slot_processors import SLOT_PROCESSORS
from model_runner_base.testing.thinking import thought
from model_runner_base.testing.tokenizer import make_tokenizer

COUNT = 32
END = "so }"


@pytest.fixture
def llm(text_engine: Callable[..., LLM], text_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine of all three under the second contract."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    envs.disable_envs_cache()
    thinking = {"reasoning_start_str": make_tokenizer().decode([start_of_thinking(text_model)])}
    yield text_engine(logits_processors=SLOT_PROCESSORS, reasoning_config={**thinking, "reasoning_end_str": END})
    monkeypatch.undo()
    envs.disable_envs_cache()


def start_of_thinking(model: TinyModel) -> int:
    """A token that the model itself generates, so that thinking begins in an output, too."""
    return model.greedy(random_prompts(3, [20])[0], 4)[2]


def run(llm: LLM, prompts: Sequence[Sequence[int]], options: list[dict[str, Any]]) -> list[list[int]]:
    return tokens_of(generate(llm, prompts, [greedy(COUNT, **each) for each in options]))


def test_thinking_budgets(llm: LLM, text_model: TinyModel) -> None:
    """thinking_token_budget ends thinking after as many tokens, which begins in a prompt or an output.

    Requests are preempted; those without a budget stay as they are."""
    markers = markers_of(llm.llm_engine.vllm_config)
    assert markers is not None
    budgets = [0, 3, 9, 5, 2, None]
    prompts = [(*prompt, *markers.start) for prompt in random_prompts(4, [5, 90, 110, 120])]
    prompts += [random_prompts(3, [20])[0], random_prompts(5, [110])[0]]
    before = metric(llm, "vllm:num_preemptions")
    got = run(llm, prompts, [{"thinking_token_budget": budget} for budget in budgets])
    want = [thought(text_model, *each, COUNT) for each in zip(prompts, [markers] * 6, budgets, strict=True)]
    check_same(
        got, want, [f"prompt of {len(p)} tokens, budget {b}" for p, b in zip(prompts, budgets, strict=True)], prompts
    )
    check_preempted(llm, before)


def test_chosen_logprobs(llm: LLM, text_model: TinyModel) -> None:
    """logprob_token_ids gives log probabilities of the chosen tokens, next to requests that ask for the likeliest."""
    asked: list[dict[str, Any]] = [
        {"logprob_token_ids": [7, 300, 41]},
        {"logprobs": 3},
        {"logprob_token_ids": list(range(100, 228))},
        {},
    ]
    prompts = random_prompts(8, [5, 40, 9, 70])
    outputs = generate(llm, prompts, [greedy(8, **each) for each in asked])
    for options, output in zip(asked, outputs, strict=True):
        check_chosen(text_model, options, output)


def test_slot_processors(llm: LLM, text_model: TinyModel) -> None:
    """A processor that keeps its state by slots follows its requests through preemption, resume and new slots."""
    prompts = random_prompts(63, [60, 70, 80, 90, 5, 40])
    requests = [
        *(Request(p, greedy(60, extra_args={"never_again": 40}), processors=[never_again(40)]) for p in prompts[:4]),
        Request(prompts[4], greedy(30, extra_args={"favour": 100}), processors=[favour(100)]),
        Request(prompts[5], sampled(30, seed=1, extra_args={"keep_top": 2}), late_processors=[keep_top(2)]),
    ]
    before = metric(llm, "vllm:num_preemptions")
    assert check_completions(llm, text_model, requests), "the processors changed nothing"
    check_preempted(llm, before)
