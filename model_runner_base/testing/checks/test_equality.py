"""Greedy tokens equal HF transformers in float32, whatever the scheduler does with the requests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from model_runner_base.testing.architectures import CONFIGS
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import (
    cache_bytes,
    check_hit,
    check_preempted,
    generate,
    greedy,
    metric,
    tokens_of,
)
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
Prompts = list[tuple[int, ...]]
NEW_TOKENS = 20
MAIN_ARCHITECTURES = ["llama", "mistral-window", "gpt2"]
"""Rotary positions and grouped heads, a sliding window, learned positions and biases."""
PROMPTS = random_prompts(0, [1, 7, 16, 33, 64, 90, 130, 200])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        names = list(CONFIGS) if metafunc.config.getoption("all_architectures") else MAIN_ARCHITECTURES
        # The scope sorts the checks by architecture: those of one share an engine.
        metafunc.parametrize("architecture", names, scope="module")


@pytest.fixture
def small_cache(architecture: str, engine: Start, tiny_model: Callable[[str], TinyModel]) -> tuple[LLM, TinyModel]:
    """An engine whose cache holds half of what the four longest requests need.

    With a sliding window older blocks are freed, so the cache is smaller: the window, and the tokens of two steps.
    """
    model = tiny_model(architecture)
    num_tokens = 288 if "window" in architecture else 448
    return engine(model.path, kv_cache_memory_bytes=cache_bytes(model.path, num_tokens)), model


def check(llm: LLM, model: TinyModel, prompts: Prompts, count: int = NEW_TOKENS) -> None:
    """Runs the prompts in one batch."""
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def test_one_request(small_cache: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks where it is longer than a step."""
    for prompt in PROMPTS:
        check(*small_cache, [prompt])


def test_mixed_batches(small_cache: tuple[LLM, TinyModel]) -> None:
    """Prompts of all lengths at once: chunks and decodes share steps."""
    llm, model = small_cache
    assert len({t for p in PROMPTS for t in model.greedy(p, NEW_TOKENS, is_certain=False)}) > 20, (
        "the reference's tokens are not diverse"
    )
    check(llm, model, PROMPTS)


def test_prefix_hits(small_cache: tuple[LLM, TinyModel]) -> None:
    """Prompts whose prefix is cached."""
    llm, model = small_cache
    prompts = PROMPTS[4:6]
    check(llm, model, prompts)

    def run_twice(llm: LLM, prompts: Prompts, counts: list[int]) -> list[list[int]]:
        params = [greedy(count) for count in counts]
        return [tokens_of(generate(llm, prompts, params)) for _ in range(2)][1]

    outputs = generate(llm, prompts, greedy(NEW_TOKENS))
    check_equal(model, prompts, tokens_of(outputs), [NEW_TOKENS] * len(prompts), run_twice)
    check_hit(any(output.num_cached_tokens for output in outputs))


def test_preemption(small_cache: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted and resumed.

    If all layers have windows, vLLM may start only as many requests as have space for theirs, and preempt none. Then a
    reset of the prefix cache preempts them.
    """
    llm, model = small_cache
    preemptions = metric(llm, "vllm:num_preemptions")
    prompts = random_prompts(1, [60, 70, 80, 90])
    check(llm, model, prompts, 100)
    if "window" in model.path.name or metric(llm, "vllm:num_preemptions") == preemptions:
        counts = [100] * len(prompts)
        check_equal(model, prompts, run_with_resets(llm, prompts, counts), counts, run_with_resets)
    check_preempted(llm, preemptions)


def run_with_resets(llm: LLM, prompts: Prompts, counts: int | list[int]) -> list[list[int]]:
    """The tokens of requests that are all preempted every 30 steps; ``counts`` may be one count for all."""
    core = llm.llm_engine
    counts = [counts] * len(prompts) if isinstance(counts, int) else counts
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        core.add_request(str(index), {"prompt_token_ids": list(prompt)}, greedy(count))
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while core.has_unfinished_requests():
        num_steps += 1
        if num_steps % 30 == 0:
            core.reset_prefix_cache(reset_running_requests=True)
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)  # type: ignore[union-attr, index]
    return [tokens[str(index)] for index in range(len(prompts))]


def test_arrivals(small_cache: tuple[LLM, TinyModel]) -> None:
    """Requests that arrive and finish at any step, among others that are aborted."""
    llm, model = small_cache
    rng = np.random.default_rng(2)
    counts = rng.integers(1, NEW_TOKENS + 1, 2 * len(PROMPTS)).tolist()

    def run(llm: LLM, prompts: Prompts, counts: list[int]) -> list[list[int]]:
        return run_with_arrivals(llm, prompts, counts, np.random.default_rng(3))

    check_equal(model, PROMPTS * 2, run(llm, PROMPTS * 2, counts), counts, run)


def run_with_arrivals(llm: LLM, prompts: Prompts, counts: list[int], rng: np.random.Generator) -> list[list[int]]:
    """The tokens of each prompt's request, which arrives at a random step; further requests come and are aborted."""
    core = llm.llm_engine
    waiting = list(enumerate(zip(prompts, counts, strict=True)))
    tokens: dict[str, list[int]] = {}
    strangers = 0
    while waiting or core.has_unfinished_requests():
        while waiting and rng.random() < 0.4:
            index, (prompt, count) = waiting.pop(0)
            core.add_request(str(index), {"prompt_token_ids": list(prompt)}, greedy(count))
            if rng.random() < 0.3:
                core.add_request(f"stranger-{strangers}", {"prompt_token_ids": list(prompt[::-1])}, greedy(50))
                strangers += 1
        if strangers and rng.random() < 0.1:
            core.abort_request([f"stranger-{rng.integers(strangers)}"])
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)  # type: ignore[union-attr, index]
    return [tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"async_scheduling": False}, [5, 40, 90, 200]),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 3}, [3, 9, 50, 75]),
        (
            {"max_num_seqs": None, "max_num_batched_tokens": None, "max_model_len": None},
            [1, 30, 255, 256, 257, 490] * 4,
        ),
    ],
    ids=["synchronous scheduling", "four tokens a step", "the platform's default limits"],
)
def test_however_it_runs(
    options: dict[str, Any], lengths: list[int], engine: Start, tiny_model: Callable[[str], TinyModel]
) -> None:
    """Other ways of scheduling: synchronous, tiny chunks, the platform's default limits."""
    model = tiny_model("llama")
    check(engine(model.path, **options), model, random_prompts(3, lengths))
