"""Sparse attention: tokens see the keys (DSA), blocks (MiniMax M3) or entries (DeepSeek V4) that an indexer chooses."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_cache_formats import PROMPTS, check
from model_runner_base.testing.engine import check_preempted, metric, runner_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import PRECISION

LIMITS = {"max_model_len": 160, "block_size": 16, "num_gpu_blocks_override": 14, "kv_cache_memory_bytes": 1 << 20}
"""Limits of a cache of 14 blocks: four long requests preempt."""


@pytest.fixture
def keys(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> tuple[LLM, TinyModel]:
    """An engine with a tiny GLM-5, and its model: contexts are up to ten times as long as what a token sees."""
    model = tiny_model("glm-5-sparse")
    return engine(model.path, **LIMITS), model


@pytest.fixture
def blocks(engine: Callable[..., LLM], block_sparse_model: TinyModel) -> tuple[LLM, TinyModel]:
    """An engine with a tiny MiniMax M3, and its model: tokens see 3 of up to 10 blocks."""
    return engine(block_sparse_model.path, **LIMITS), block_sparse_model


@pytest.fixture
def entries(engine: Callable[..., LLM], compressed_model: TinyModel) -> tuple[LLM, TinyModel]:
    """An engine with a tiny DeepSeek V4, and its model: tokens see a window of 24, and 6 of up to 40 entries."""
    PRECISION.require_exact("tokens of DeepSeek V4")
    limits = {"max_model_len": 160, "max_num_batched_tokens": 50, "block_size": 128}
    return engine(compressed_model.path, enforce_eager=True, kv_cache_memory_bytes=32 << 20, **limits), compressed_model


def check_one_by_one(llm: LLM, model: TinyModel, num_prompts: int = len(PROMPTS) - 2) -> None:
    """Compares requests on their own, their prompts cut into chunks, then one with its prefix from the cache."""
    for prompt in PROMPTS[-num_prompts:]:
        check(llm, model, [prompt])
    check(llm, model, PROMPTS[-1:])


def check_mixed(llm: LLM, model: TinyModel) -> None:
    """Compares prompts of all lengths at once, and that nothing was compiled for them after warm-up."""
    policy = runner_of(llm).graph_policy
    before = policy.num_compilations()
    check(llm, model, PROMPTS)
    assert policy.num_compilations() == before, f"{policy.num_compilations() - before} compilations after warm-up"


def check_with_preemption(llm: LLM, model: TinyModel) -> None:
    """Compares requests some of which are preempted, and go on with keys that are made again."""
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, random_prompts(116, [60, 70, 50, 40]), 40)
    check_preempted(llm, before)


def test_chosen_keys_of_one_request(keys: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks, then with its prefix from the cache."""
    check_one_by_one(*keys)


def test_chosen_keys_in_mixed_batches(keys: tuple[LLM, TinyModel]) -> None:
    """Prompts shorter and longer than the choice, with requests that decode; nothing is compiled for them."""
    check_mixed(*keys)


def test_chosen_keys_after_preemption(keys: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted, and go on with latents and keys of indexers that are made again."""
    check_with_preemption(*keys)


def test_chosen_blocks_of_one_request(blocks: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks, then with its prefix, where KV heads see chosen blocks."""
    check_one_by_one(*blocks)


def test_chosen_blocks_in_mixed_batches(blocks: tuple[LLM, TinyModel]) -> None:
    """Prompts shorter and longer than the chosen blocks, with requests that decode; nothing is compiled for them."""
    check_mixed(*blocks)


def test_chosen_blocks_after_preemption(blocks: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted, and go on with keys of layers and of indexers that are made again."""
    check_with_preemption(*blocks)


def test_entries_of_one_request(entries: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks, then with its prefix, where layers compress tokens to
    entries."""
    check_one_by_one(*entries, num_prompts=1)


def test_entries_in_mixed_batches(entries: tuple[LLM, TinyModel]) -> None:
    """Prompts shorter and longer than windows and entries, with requests that decode."""
    check_mixed(*entries)
