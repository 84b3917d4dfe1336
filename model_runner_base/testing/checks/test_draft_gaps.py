"""Steps without drafts between others, and prefix hits around the ends of blocks, of models with and without states."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import (
    DEFAULTS,
    generate,
    greedy,
    metric,
    require_small_blocks,
    runner_of,
    tokens_of,
)
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(200, [1, 3, 16, 33, 64])
NEW_TOKENS = 18
LONGEST = DEFAULTS["max_model_len"] - NEW_TOKENS
KEEPS_STATES = "qwen3-next"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "block_size": 16, "num_gpu_blocks_override": 40}
DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted"))


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
    texts = dict.fromkeys([*PROMPTS, *around_blocks(block_size_of(llm))], NEW_TOKENS)
    before = [metric(llm, name) for name in (DRAFTED, ACCEPTED)]
    known, steps = KnownDrafts(llm, model, texts, is_wrong=False), count()

    def look_up(req_ids: list[str], *args: Any) -> list[list[int]]:
        has_none = next(steps) % 7 in (1, 4, 5)
        return [[] for _ in req_ids] if has_none else known.look_up(req_ids, *args)

    monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", look_up)
    yield llm, model
    drafted, accepted = (metric(llm, name) - old for name, old in zip((DRAFTED, ACCEPTED), before, strict=True))
    assert drafted > accepted > 0, "drafts were all right, or all wrong"


def block_size_of(llm: LLM) -> int:
    """Tokens of a block, which a platform may choose otherwise than it was asked for."""
    return llm.llm_engine.vllm_config.cache_config.block_size


def around_blocks(size: int) -> list[tuple[int, ...]]:
    """Prompts that end at a block's end, one token before or after: after one block, and after three if they fit."""
    ends = [blocks * size for blocks in (1, 3) if blocks * size < LONGEST]
    return random_prompts(201, [end + offset for end in ends for offset in (-1, 0, 1)])


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
    size = block_size_of(drafted[0])
    prompts = around_blocks(size)
    if not prompts:
        check(*drafted, PROMPTS)  # Else nothing would be drafted, which is an error of its own.
        require_small_blocks("no prefix is kept for others")
    for prompt in prompts:
        hit = (len(prompt) - 1) // size * size
        assert check(*drafted, [prompt]) == [0]
        assert check(*drafted, [prompt]) == [hit], f"a prompt of {len(prompt)} tokens"
        longer = (prompt[:hit] + prompt)[:LONGEST]
        assert check(*drafted, [longer])[0] >= hit, f"a prompt of {len(longer)} tokens"
    check(*drafted, prompts[-4:])
