"""The same steps twice give the same numbers, bit for bit."""

from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate

LENGTHS = [70, 1, 33, 20]
"""Lengths of prompts that are cut into chunks, and that decode together."""
TIMES = 3


def numbers_of(output: Any) -> list[tuple[str, int, float]]:
    """Log probabilities of a request: where each is, its token, and its value."""
    of_prompt, of_output = output.prompt_logprobs or [], output.outputs[0].logprobs
    places = [(f"prompt token {i}", entry) for i, entry in enumerate(of_prompt)]
    places += [(f"token {i}", entry) for i, entry in enumerate(of_output)]
    return [(where, token, each.logprob) for where, entry in places if entry for token, each in entry.items()]


def test_same_steps_twice(text_engine: Callable[..., LLM]) -> None:
    """The same steps twice give the same log probabilities, bit for bit."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=8, prompt_logprobs=8)
    runs = []
    for _ in range(TIMES):
        llm = text_engine()  # Its prefix cache is empty, so each run has the same steps.
        runs.append([numbers_of(output) for output in generate(llm, random_prompts(63, LENGTHS), params)])
    for number, run in enumerate(runs[1:], start=2):
        for prompt, first, again in zip(LENGTHS, runs[0], run, strict=True):
            assert len(first) == len(again), (
                f"prompt of {prompt} tokens: run {number} has {len(again)} log probabilities, the first {len(first)}"
            )
            different = [(one, two) for one, two in zip(first, again, strict=True) if one != two]
            if different:
                (where, token, value), (_, other, second) = different[0]
                raise AssertionError(
                    f"not the same bit for bit in run {number}: of the prompt of {prompt} tokens {len(different)} of "
                    f"{len(first)} log probabilities differ; at {where}, token {token} has {value!r}, and {other} "
                    f"{second!r}: some kernel is not deterministic, or reads what it should not"
                )
