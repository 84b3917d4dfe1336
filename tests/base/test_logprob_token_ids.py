"""Log probabilities of tokens that a request chooses (``logprob_token_ids``, which vLLM 0.33 has)."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import engine
from lane import HAS_OPENXLA

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import generate, greedy, metric, sampled
from model_runner_base.testing.logprobs import check_chosen
from model_runner_base.testing.models import TinyModel

ASKED: list[dict[str, Any]] = [
    {"logprob_token_ids": [7, 300, 41]},
    {"logprobs": 3},
    {"logprob_token_ids": list(range(100, 228))},
    {},
    {"logprob_token_ids": [9], "logprobs": 1},
]


@pytest.mark.skipif(HAS_OPENXLA, reason="vLLM 0.16 has no such parameter")
def test_chosen_tokens_beside_drafts(tiny_model: Callable[[str], TinyModel]) -> None:
    """Requests that choose tokens run with others that ask for the likeliest or for none, and with chunks."""
    model = tiny_model("llama")
    options: dict[str, Any] = {"speculative_config": speculation("noisy", model)}
    prompts = random_prompts(8, [5, 40, 9, 70, 3])
    with engine(model.path, max_model_len=128, max_num_batched_tokens=32, enforce_eager=True, **options) as llm:
        params = [greedy(10, **asked) for asked in ASKED[:-1]] + [sampled(10, seed=3, temperature=0.5, **ASKED[-1])]
        for asked, output in zip(ASKED, generate(llm, prompts, params), strict=True):
            check_chosen(model, asked, output)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 3
        with pytest.raises(Exception, match="512"):
            generate(llm, prompts[:1], [greedy(2, logprob_token_ids=[512])])
