"""Preemption at every step of a request, under both contracts of vLLM's scheduler: each token is delivered once.

To the first model runner a request that resumes is a cached one; to the second (``VLLM_USE_V2_MODEL_RUNNER``) it is a
new one, with all its tokens.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from vllm import LLM, envs
from vllm.sampling_params import RequestOutputKind

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import Engines, cache_bytes, core_of, greedy, metric
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request

PROMPTS = random_prompts(180, [5, 40, 17])
"""Prompts of which the second has several chunks."""
COUNT = 9
CASES = {
    "asynchronous": ("0", True, None),
    "asynchronous, second contract": ("1", True, None),
    "synchronous, with drafts": ("0", False, "noisy"),
    "synchronous, second contract": ("1", False, None),
}
"""Contract of each case, whether scheduling is asynchronous, and the kind of drafts."""
DRAFTED = "vllm:spec_decode_num_draft_tokens"


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, engines: Engines) -> Iterator[str]:
    """A case; no engine of another contract is left before it or after it."""
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, CASES[request.param][0])
        envs.disable_envs_cache()
        engines.close()
        yield request.param
        engines.close()
    envs.disable_envs_cache()


@pytest.fixture
def llm(case: str, text_engine: Callable[..., LLM], text_model: TinyModel) -> LLM:
    contract, is_async, drafts = CASES[case]
    options: dict[str, Any] = {"async_scheduling": is_async, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    if drafts is not None:
        options["speculative_config"] = speculation(drafts, text_model)
        options["kv_cache_memory_bytes"] = 2 * cache_bytes(text_model.path, 448)
    llm = text_engine(**options)
    assert core_of(llm).scheduler.use_v2_model_runner is (contract == "1")
    return llm


def test_preemption_at_every_step(llm: LLM, case: str, text_model: TinyModel) -> None:
    """Requests that are all preempted after any step, also twice: no token comes twice or is lost, none is preempted
    more often."""
    drafted = metric(llm, DRAFTED)
    num_steps = check(llm, text_model, "undisturbed", [])
    for step in range(1, num_steps):
        check(llm, text_model, f"preempted after step {step}", [step])
    for first, second in pairwise(range(3, num_steps, 4)):
        check(llm, text_model, f"preempted after steps {first} and {second}", [first, second])
    assert CASES[case][2] is None or metric(llm, DRAFTED) > drafted, "nothing was drafted"


def check(llm: LLM, model: TinyModel, name: str, stops: list[int]) -> int:
    """Checks what is delivered of requests that are preempted after some steps; returns how many steps there were."""
    before, counts = metric(llm, "vllm:num_preemptions"), [COUNT] * len(PROMPTS)
    frames, num_steps, num_expected = run(llm, PROMPTS, counts, stops)

    def run_again(llm: LLM, prompts: list[tuple[int, ...]], counts: list[int]) -> list[list[int]]:
        return [joined(each) for each in run(llm, prompts, counts, stops)[0]]

    check_equal(model, PROMPTS, [joined(each) for each in frames], counts, run_again, where=name)
    for index, each in enumerate(frames):
        empty = sum(not frame for frame in each[:-1])
        assert not empty, f"{name}: request {index}: {empty} outputs without a token: {each}"
    num_preempted = metric(llm, "vllm:num_preemptions") - before
    assert num_preempted == num_expected, f"{name}: {num_preempted:.0f} preemptions, and {num_expected} were asked for"
    return num_steps


def joined(frames: list[list[int]]) -> list[int]:
    return [token for frame in frames for token in frame]


def run(
    llm: LLM, prompts: list[tuple[int, ...]], counts: list[int], stops: list[int]
) -> tuple[list[list[list[int]]], int, int]:
    """Runs prompts, which are preempted after some steps.

    Returns what is delivered of each, piece by piece, how many steps there were, and how many preemptions.
    """
    core, scheduler = llm.llm_engine, core_of(llm).scheduler
    llm.reset_prefix_cache()
    num_expected = num_steps = 0
    frames: list[list[list[int]]] = [[] for _ in prompts]
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        params = greedy(count, output_kind=RequestOutputKind.DELTA)
        core.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
    while core.has_unfinished_requests():
        assert num_steps < 30 + 20 * len(stops), f"preempted after steps {stops}: the requests do not end"
        for output in core.step():
            piece = output.outputs[0]  # type: ignore[index]
            frames[int(output.request_id)].append(list(piece.token_ids))  # type: ignore[union-attr]
        num_steps += 1
        if num_steps in stops and core.has_unfinished_requests():
            num_expected += len(scheduler.running)
            core.reset_prefix_cache(reset_running_requests=True)
    return frames, num_steps, num_expected


def test_strong_penalties(llm: LLM, case: str, text_model: TinyModel) -> None:
    """Strong penalties in a mixed batch are the reference's, synchronously and asynchronously, preempted or not."""
    rules: list[dict[str, Any]] = [
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0, "repetition_penalty": 0.5},
        {},
    ]
    prompts = random_prompts(181, [4, 40, 9, 60, 90, 33])
    requests = [Request(prompt, greedy(40, **each)) for prompt, each in zip(prompts, rules, strict=True)]
    assert check_completions(llm, text_model, requests, bystanders=0), "the penalties changed nothing"
