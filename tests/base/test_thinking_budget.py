"""Thinking budgets: the end of thinking is forced after as many tokens as the budget has."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import engine
from hypothesis import given
from hypothesis import strategies as st
from lane import HAS_OPENXLA
from vllm import LLM, SamplingParams

from model_runner_base.heads.sampling.thinking_budget import Markers, Thinking
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import cache_bytes, generate, greedy, metric, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.thinking import forced, thought
from model_runner_base.testing.tokenizer import add_tokenizer, make_tokenizer

COUNT = 48


marker = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


@given(
    st.builds(Markers, marker, marker, marker).filter(lambda each: each.start != each.natural_end),
    st.integers(0, 5),
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_rule(markers: Markers, budget: int, prompt: list[int], output: list[int]) -> None:
    """Reading token by token finds what a look at all tokens finds, wherever the prompt ends."""
    overlap = set(markers.start) & set(markers.natural_end)
    if overlap:  # Markers that run into each other have no order; those of real models share no token.
        return
    thinking = Thinking(markers, budget, prompt)
    for count in range(len(output) + 1):
        tokens = [*prompt, *output[:count]]
        assert thinking.num_tokens == len(tokens)
        assert thinking.forced_token() == forced(tokens, markers, budget)
        if count < len(output):
            thinking.read(output[count])


@pytest.mark.skipif(HAS_OPENXLA, reason="vLLM 0.16 has no thinking budgets")
def test_budgets_beside_drafts(tiny_model: Callable[[str], TinyModel]) -> None:
    """Budgets are kept wherever thinking begins, among requests without one, and after preemption, as the kit checks
    without drafts."""
    model = add_tokenizer(tiny_model("llama"))
    tokenizer = make_tokenizer()
    likely = model.greedy(tuple(random_prompts(3, [20])[0]), 4)[2]
    start, end = tokenizer.decode([likely]), "so }"
    options: dict[str, Any] = {
        "reasoning_config": {"reasoning_start_str": start, "reasoning_end_str": end},
        "skip_tokenizer_init": False,
        "kv_cache_memory_bytes": cache_bytes(model.path, 320) * 2,
        "max_model_len": 256,
        "enforce_eager": True,
        "speculative_config": speculation("noisy", model),
    }
    with engine(model.path, **options) as llm:
        config = llm.llm_engine.vllm_config.reasoning_config
        start_ids, end_ids = config.reasoning_start_token_ids, config.reasoning_end_token_ids
        markers = Markers(start_ids, end_ids, end_ids)
        thinks = [(*prompt, *start_ids) for prompt in random_prompts(4, [5, 60, 90, 100])]
        prompts = [*thinks, random_prompts(3, [20])[0], random_prompts(5, [70])[0]]
        budgets = [0, 3, 9, 5, 2, None]
        check(llm, model, prompts, markers, budgets)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 5


def check(
    llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], markers: Markers, budgets: list[int | None]
) -> None:
    params: list[SamplingParams] = [greedy(COUNT, thinking_token_budget=budget) for budget in budgets]
    got = tokens_of(generate(llm, prompts, params))
    want = [thought(model, prompt, markers, budget, COUNT) for prompt, budget in zip(prompts, budgets, strict=True)]
    assert got == want
    plain = [model.greedy(prompt, COUNT) for prompt in prompts]
    assert sum(tokens != other for tokens, other in zip(got, plain, strict=True)) >= 4, "the budgets changed little"
