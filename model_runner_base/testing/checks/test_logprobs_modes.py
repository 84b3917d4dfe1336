"""The engine option ``logprobs_mode``."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.logprobs import RULES, check_all
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_mode(mode: str, text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """logprobs_mode: raw or processed, logits or logprobs, with what rules exclude at -inf."""
    llm = text_engine(logprobs_mode=mode)
    (prompt,) = random_prompts(10, [20])
    counts: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2}
    requests = [Request(prompt, SamplingParams(**counts, **options)) for options in RULES]
    for request in requests:
        check_all(llm, text_model, [request], mode)
    check_all(llm, text_model, requests, mode)
