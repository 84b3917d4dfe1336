"""Recurrent layers: a request's state is its own, however its tokens come, and whatever other requests left there."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import check_hit, check_preempted, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
PROMPTS = random_prompts(95, [1, 2, 3, 5, 16, 33, 64, 90, 130])
NEW_TOKENS = 16


KEEPS_PREFIXES = "qwen3-next"
"""The model that is served with prefix caching."""


# The scope sorts the checks by model: those of one share an engine.
@pytest.fixture(scope="module", params=["granite-hybrid", KEEPS_PREFIXES])
def name(request: pytest.FixtureRequest) -> str:
    """Names of tiny models: Mamba 2 or gated delta nets, each with a convolution, and attention."""
    return request.param


@pytest.fixture
def hybrid(name: str, engine: Start, tiny_model: Callable[[str], TinyModel]) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine, which compiles nothing after warm-up, and its model.

    Its cache has 18 blocks, one of which is the null block: four long requests preempt.
    """
    model = tiny_model(name)
    options = {"kv_cache_memory_bytes": 4 << 20, "block_size": 16, "num_gpu_blocks_override": 18}
    llm = engine(model.path, **options, enable_prefix_caching=name == KEEPS_PREFIXES)
    policy = runner_of(llm).graph_policy
    warm = policy.num_compilations()
    yield llm, model
    assert policy.num_compilations() == warm, "sizes were compiled after warm-up"


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
    check(llm, model, random_prompts(96, [60, 70, 50, 40]), 70)
    check_preempted(llm, before)


def test_arrivals(hybrid: tuple[LLM, TinyModel]) -> None:
    """Requests that arrive and finish at any step, among others that are aborted."""
    llm, model = hybrid
    rng = np.random.default_rng(97)
    counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()

    def run(llm: LLM, prompts: list[tuple[int, ...]], counts: list[int]) -> list[list[int]]:
        return run_with_arrivals(llm, prompts, counts, np.random.default_rng(98))

    check_equal(model, PROMPTS, run(llm, PROMPTS, counts), counts, run)


@pytest.mark.parametrize("keeps_states", [False, True], ids=["alone", "with prefixes"])
def test_wrong_drafts(
    keeps_states: bool, engine: Start, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of which some are wrong, of requests that share a step with chunks of prompts, or are preempted."""
    model = tiny_model("qwen3-next")
    options = {"kv_cache_memory_bytes": 4 << 20, "block_size": 16, "num_gpu_blocks_override": 18}
    llm = engine(
        model.path, **options, speculative_config=speculation("ngram", model), enable_prefix_caching=keeps_states
    )
    long = random_prompts(96, [60, 70, 50, 40])
    known = KnownDrafts(llm, model, dict.fromkeys(PROMPTS, NEW_TOKENS) | dict.fromkeys(long, 70), is_wrong=False)
    monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", known.look_up)
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, PROMPTS)
    check(llm, model, long, 70)
    drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    assert drafted > accepted > 0, "drafts were all right, or all wrong"
    if keeps_states:
        for _ in range(2):  # Others took the blocks of the first time.
            check(llm, model, long[:1], 70)
        check_hit(metric(llm, "vllm:prefix_cache_hits") > 0)
    check_preempted(llm, before)


@pytest.mark.parametrize("name", [KEEPS_PREFIXES], indirect=True, scope="module")
def test_prefix_hits(hybrid: tuple[LLM, TinyModel]) -> None:
    """Prompts whose prefix is cached begin with the state at its end, and leave it as it is for others."""
    llm, model = hybrid
    for prompt in random_prompts(98, [31, 32, 33, 65]):
        check(llm, model, [prompt])
        prompts = [prompt, prompt[:-1] + prompt, prompt]
        outputs = generate(llm, prompts, greedy(NEW_TOKENS))
        check_equal(model, prompts, tokens_of(outputs), [NEW_TOKENS] * 3)
        assert [output.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 16 * 16] * 3
