"""Steps without drafts between others, and prefix hits around the ends of blocks, of models with and without states."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import check_equal
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel

SIZE = 16
"""Tokens of a block."""
PROMPTS = random_prompts(200, [1, 3, 16, 33, 64])
AROUND_BLOCKS = random_prompts(201, [blocks * SIZE + offset for blocks in (1, 3) for offset in (-1, 0, 1)])
NEW_TOKENS = 18
KEEPS_STATES = "qwen3-next"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "block_size": SIZE, "num_gpu_blocks_override": 40}


# The scope sorts the checks by model: those of one share an engine.
@pytest.fixture(scope="module", params=["llama", KEEPS_STATES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def drafted(
    name: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine with drafts that are often wrong, and none at all in some steps; prefixes are kept."""
    model = tiny_model(name)
    llm = engine(model.path, **OPTIONS, speculative_config=speculation("ngram", model), enable_prefix_caching=True)
    texts = dict.fromkeys([*PROMPTS, *AROUND_BLOCKS], NEW_TOKENS)
    known, steps = KnownDrafts(llm, model, texts, is_wrong=False), count()

    def look_up(req_ids: list[str], *args: Any) -> list[list[int]]:
        has_none = next(steps) % 7 in (1, 4, 5)
        return [[] for _ in req_ids] if has_none else known.look_up(req_ids, *args)

    monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", look_up)
    yield llm, model
    drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert drafted > accepted > 0, "drafts were all right, or all wrong"


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]]) -> list[int]:
    """Checks tokens; returns how many tokens of each prompt were hit."""
    outputs = generate(llm, prompts, greedy(NEW_TOKENS))
    check_equal(model, prompts, tokens_of(outputs), [NEW_TOKENS] * len(prompts))
    return [output.num_cached_tokens or 0 for output in outputs]


def test_steps_without_drafts(drafted: tuple[LLM, TinyModel]) -> None:
    """Requests alone and in one batch, with drafts in some steps and none in others."""
    for prompt in PROMPTS:
        check(*drafted, [prompt])
    drafted[0].reset_prefix_cache()
    check(*drafted, PROMPTS)


def test_prefix_hits_around_blocks(drafted: tuple[LLM, TinyModel]) -> None:
    """Prompts that end at a block's end, one token before or after: computed, hit, and continued."""
    for prompt in AROUND_BLOCKS:
        hit = (len(prompt) - 1) // SIZE * SIZE
        assert check(*drafted, [prompt]) == [0]
        assert check(*drafted, [prompt]) == [hit], f"a prompt of {len(prompt)} tokens"
        longer = prompt[:hit] + prompt
        assert check(*drafted, [longer])[0] >= hit, f"a prompt of {len(longer)} tokens"
    check(*drafted, AROUND_BLOCKS[-4:])
