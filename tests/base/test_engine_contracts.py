"""Contracts of vLLM's scheduler with its first model runner, and with its second: the same tokens come of both.

To the second (``VLLM_USE_V2_MODEL_RUNNER``) a request that resumes is a new one, with all its tokens.
Drafts are verified under both.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import engine
from vllm import LLM, SamplingParams, envs

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import cache_bytes, core_of, greedy, metric, sampled
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.tokenizer import add_tokenizer

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
COUNTS = [30, 100, 40, 90, 1, 60, 100, 25]
LENGTHS = [60, 70, 80, 90, 1, 33, 64, 130]


def params_of(index: int, count: int) -> SamplingParams:
    """Greedy requests; such as are drawn, with and without a seed of their own; one that looks back on its output."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.0},
        {"temperature": 0, "repetition_penalty": 1.3, "bad_words": ["a"]},
    ]
    options = kinds[index % len(kinds)]
    return greedy(count) if options == kinds[0] else sampled(count, **options)


def run(llm: LLM, prompts: list[tuple[int, ...]], rng: np.random.Generator) -> list[list[int]]:
    """Tokens of requests that arrive at random steps, while another request runs and is aborted."""
    core = llm.llm_engine
    waiting = list(enumerate(zip(prompts, COUNTS, strict=True)))
    tokens: dict[str, list[int]] = {}
    core.add_request("stranger", {"prompt_token_ids": list(prompts[0])}, greedy(100))
    num_steps = 0
    while waiting or core.has_unfinished_requests():
        while waiting and rng.random() < 0.4:
            index, (prompt, count) = waiting.pop(0)
            core.add_request(str(index), {"prompt_token_ids": list(prompt)}, params_of(index, count))
        num_steps += 1
        if num_steps == 20:
            core.abort_request(["stranger"])
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)  # type: ignore[union-attr, index]
    return [tokens[str(index)] for index in range(len(prompts))]


def run_under(
    contract: str, model: TinyModel, prompts: list[tuple[int, ...]], is_async: bool, draft: str | None
) -> list[list[int]]:
    """Tokens of an engine whose scheduler speaks to runner ``contract``; many requests are preempted.

    The engine is eager, since the contract is the host's.
    """
    options: dict[str, Any] = {
        "async_scheduling": is_async,
        "kv_cache_memory_bytes": cache_bytes(model.path, 320) * (2 if draft else 1),
        "skip_tokenizer_init": False,
        "max_model_len": 256,
        "enforce_eager": True,
    }
    if draft:
        options |= {"speculative_config": speculation(draft, model)}
    with engine(model.path, **options) as llm:
        assert core_of(llm).scheduler.use_v2_model_runner is (contract == "1")
        tokens = run(llm, prompts, np.random.default_rng(3))
        assert metric(llm, "vllm:num_preemptions") > 3, "little was preempted"
        assert not draft or metric(llm, "vllm:spec_decode_num_accepted_tokens") > 20
    return tokens


@pytest.mark.parametrize("draft", [None, "noisy"], ids=["alone", "drafts"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_same_tokens_from_both(
    is_async: bool, draft: str | None, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, results = add_tokenizer(tiny_model("llama")), random_prompts(11, LENGTHS), {}
    for contract in ("0", "1"):
        monkeypatch.setenv(VARIABLE, contract)
        envs.disable_envs_cache()
        results[contract] = run_under(contract, model, prompts, is_async, draft)
    envs.disable_envs_cache()
    assert results["0"] == results["1"]
    for index in range(0, len(prompts), 4):
        assert results["1"][index] == model.greedy(prompts[index], COUNTS[index]), index
