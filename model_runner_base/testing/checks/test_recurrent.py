"""Recurrent layers: a request's state is its own, however its tokens come, and whatever other requests left there."""

from collections.abc import Callable

import numpy as np
import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import check_equal, run_with_arrivals
from model_runner_base.testing.engine import generate, greedy, metric, tokens_of
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
PROMPTS = random_prompts(95, [1, 2, 3, 5, 16, 33, 64, 90, 130])
NEW_TOKENS = 16


# The scope sorts the checks by model: those of one share an engine.
@pytest.fixture(scope="module", params=["bamba", "qwen3-next"])
def name(request: pytest.FixtureRequest) -> str:
    """Names of tiny models: Mamba 2 or gated delta nets, each with a convolution, and attention."""
    return request.param


@pytest.fixture
def hybrid(name: str, engine: Start, tiny_model: Callable[[str], TinyModel]) -> tuple[LLM, TinyModel]:
    """An engine and its model. Its cache has 14 blocks, one of which is the null block: four long requests preempt."""
    model = tiny_model(name)
    return engine(model.path, kv_cache_memory_bytes=4 << 20, block_size=16, num_gpu_blocks_override=14), model


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def test_one_request(hybrid: tuple[LLM, TinyModel]) -> None:
    """A request on its own, from one token on; each finds the state of the one before."""
    for prompt in PROMPTS:
        check(*hybrid, [prompt])


def test_mixed_batches(hybrid: tuple[LLM, TinyModel]) -> None:
    """Prompts of all lengths at once, cut into chunks, beside requests that decode."""
    check(*hybrid, PROMPTS)


def test_preemption(hybrid: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted begin anew, with other states."""
    llm, model = hybrid
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, random_prompts(96, [60, 70, 50, 40]), 40)
    assert metric(llm, "vllm:num_preemptions") > before, "nothing was preempted"


def test_arrivals(hybrid: tuple[LLM, TinyModel]) -> None:
    """Requests that arrive and finish at any step, among others that are aborted."""
    llm, model = hybrid
    rng = np.random.default_rng(97)
    counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
    check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, counts, rng), counts)
