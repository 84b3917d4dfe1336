"""Custom logits processors (engine option ``logits_processors``), each among requests that do not ask for it."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import check_preempted, greedy, metric, sampled
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processors import PROCESSORS, favour, flatten, keep_top, never_again
from model_runner_base.testing.reference import Request


@pytest.fixture
def check(text_engine: Callable[..., LLM], text_model: TinyModel) -> Callable[[list[Request]], int]:
    """Runs requests on an engine with the processors; returns at how many tokens they mattered."""
    return lambda requests: check_completions(text_engine(logits_processors=PROCESSORS), text_model, requests)


def test_processor_that_changes_the_maximum(check: Callable[[list[Request]], int]) -> None:
    """A processor that is not argmax-invariant acts on greedy and on drawn tokens."""
    prompts = random_prompts(60, [5, 40, 9])
    params = [greedy(10), sampled(10, top_k=4, seed=1), greedy(10, repetition_penalty=2.0)]
    requests = []
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        param.extra_args = {"favour": 100 + i}
        requests.append(Request(prompt, param, processors=[favour(100 + i)]))
    assert check(requests), "the processor changed nothing"


def test_processor_that_leaves_the_maximum(check: Callable[[list[Request]], int]) -> None:
    """An argmax-invariant processor acts on drawn tokens, after the temperature."""
    requests = [
        Request(prompt, sampled(30, seed=i, temperature=2.0, extra_args={"keep_top": i + 1}), late_processors=[keep])
        for i, (prompt, keep) in enumerate(zip(random_prompts(61, [5, 70]), map(keep_top, [1, 2]), strict=True))
    ]
    check(requests)


def test_processor_comes_after_min_p(check: Callable[[list[Request]], int]) -> None:
    """min_p acts before an argmax-invariant processor, which may flatten the logits that it leaves."""
    requests = [
        Request(prompt, sampled(40, seed=i, min_p=0.3, extra_args={"flatten": 0.1}), late_processors=[flatten(0.1)])
        for i, prompt in enumerate(random_prompts(64, [5, 20]))
    ]
    check(requests)


def test_processor_comes_after_penalties(check: Callable[[list[Request]], int]) -> None:
    """An argmax-invariant processor sees penalised logits, and leaves greedy requests alone."""
    prompts = random_prompts(65, [6, 25, 9])
    keep = {"presence_penalty": 2.0, "repetition_penalty": 1.5, "extra_args": {"keep_top": 1}}
    requests = [
        Request(prompts[0], greedy(30, **keep), late_processors=[keep_top(1)]),
        Request(prompts[1], sampled(30, seed=5, **keep), late_processors=[keep_top(1)]),
        Request(prompts[2], sampled(30, seed=6, presence_penalty=2.0, min_p=0.2)),
    ]
    assert check(requests), "the penalties changed nothing"


def test_processor_of_a_request(check: Callable[[list[Request]], int]) -> None:
    """An AdapterLogitsProcessor sees each request's prompt and latest output tokens."""
    prompts = random_prompts(62, [5, 30, 80])
    requests = [
        Request(prompt, greedy(25, extra_args={"never_again": 3 + i}), processors=[never_again(3 + i)])
        for i, prompt in enumerate(prompts)
    ]
    assert check(requests), "the processor changed nothing"


def test_processors_after_preemption(text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Processors follow their requests through preemption, resume and changing rows."""
    llm = text_engine(logits_processors=PROCESSORS)
    before = metric(llm, "vllm:num_preemptions")
    requests = [
        Request(prompt, greedy(80, extra_args={"never_again": 40}), processors=[never_again(40)])
        for prompt in random_prompts(63, [60, 70, 80, 90])
    ]
    check_completions(llm, text_model, requests)
    check_preempted(llm, before)
