"""Soak: many random requests through one engine leave nothing, and those that finish are right."""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.cases import FIRST_TOKEN
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric
from model_runner_base.testing.leftovers import check_nothing_left, count_infos
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.table import refusal

NUM_REQUESTS = 300
NAME = "soak-"
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"temperature": 0, "logit_bias": {7: 3.0, 8: -100.0}},
    {"temperature": 0, "bad_words": ["an", "the", "q"]},
    {"temperature": 0, "min_tokens": 1, "stop_token_ids": list(range(40, 140))},
    {"temperature": 0, "allowed_token_ids": list(range(30, 90))},
    {"temperature": 0, "logprobs": 4},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.6, "seed": 11},
    {"temperature": 1.3, "min_p": 0.2, "logprobs": 25},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-h]{2,20}")},
]

LEFT_OVER_BYTES = 48 << 20
"""Bytes by which memory may grow after the first third, however many requests follow: allocators keep what the largest
batch so far has used, and a larger one may come at any time. The check's own list of results is allowed in addition."""
RESULT_BYTES = 4 << 10


@dataclass
class Result:
    """A request that went through the engine; its prompt can be made again."""

    number: int
    options: dict[str, Any]
    max_tokens: int
    tokens: np.ndarray


def prompt_of(number: int) -> list[int]:
    """A random prompt; every fourth begins like others, so that prefixes are found in the cache."""
    rng = np.random.default_rng(number)
    length = int(rng.choice([1, 5, 20, 60, 150]))
    return (
        np.random.default_rng(number % 3 if number % 4 == 0 else number)
        .integers(FIRST_TOKEN, VOCAB_SIZE, length)
        .tolist()
    )


def params_of(options: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def supported(llm: LLM) -> list[dict[str, Any]]:
    """Options that the device accepts; plain greedy ones are repeated until they are half of the list."""
    accepted = []
    for options in OPTIONS:
        try:
            generate(llm, [(5, 6, 7)], params_of(options, 1))
        except Exception as error:
            if refusal(error) is None:
                raise
        else:
            accepted.append(options)
    return [OPTIONS[0]] * len(accepted) + accepted


class Soak:
    """Requests that arrive and are aborted at random steps."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.random = random.Random(0)
        self.options = supported(llm)
        self.results: list[Result] = []
        self._running: dict[str, Result] = {}
        self._count = 0

    def run(self, count: int) -> None:
        """Sends ``count`` requests and steps until all have ended."""
        end = self._count + count
        while self._count < end or self.engine.has_unfinished_requests():
            while self._count < end and len(self._running) < 9 and self.random.random() < 0.4:
                self._add()
            if self._running and self.random.random() < 0.03:
                # Every other time the newest, whose prompt may not be through.
                names = list(self._running)
                name = names[-1] if self.random.random() < 0.5 else self.random.choice(names)
                self.engine.abort_request([name])
                self._running.pop(name, None)
            for output in self.engine.step():
                if output.finished and output.request_id in self._running:
                    result = self._running.pop(output.request_id)
                    result.tokens = np.array(output.outputs[0].token_ids, np.int32)  # type: ignore[index]
                    self.results.append(result)

    def _add(self) -> None:
        result = Result(self._count, self.random.choice(self.options), self.random.randint(1, 60), np.empty(0))
        name = f"{NAME}{self._count}"
        prompt = {"prompt_token_ids": prompt_of(self._count)}
        self.engine.add_request(name, prompt, params_of(result.options, result.max_tokens))  # type: ignore[arg-type]
        self._running[name] = result
        self._count += 1


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_soak(text_engine: Callable[..., LLM], text_model: TinyModel, pytestconfig: pytest.Config) -> None:
    """No block, row, entry or memory is left after many random requests, and those that finished are right."""
    llm = text_engine()
    count = max(NUM_REQUESTS, pytestconfig.getoption("soak"))
    preemptions = metric(llm, "vllm:num_preemptions")
    num_infos = count_infos()
    soak = Soak(llm)
    soak.run(count // 3)
    before = memory()
    soak.run(count - count // 3)
    grown = memory() - before
    allowed = LEFT_OVER_BYTES + RESULT_BYTES * count
    assert grown < allowed, f"{grown >> 20} MiB more after {count} requests than after a third of them"
    check_preempted(llm, preemptions)

    generate(llm, [(5, 6, 7)], greedy(1))  # The end of a request is told in the step after it.
    check_nothing_left(llm, NAME, num_infos, known=1)

    assert len(soak.results) > 0.6 * count
    for result in soak.results:
        if "structured_outputs" not in result.options:
            request = Request(prompt_of(result.number), params_of(result.options, result.max_tokens))
            check_tokens(text_model, request, result.tokens.tolist())
            stops = "stop_token_ids" in result.options
            assert stops or len(result.tokens) == result.max_tokens, f"{request}: {len(result.tokens)} tokens"
