"""Sparse attention (DSA): tokens that see the keys which an indexer chooses, in contexts eight times as long."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_cache_formats import PROMPTS, check
from model_runner_base.testing.engine import check_preempted, metric
from model_runner_base.testing.models import TinyModel


@pytest.fixture
def sparse(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> tuple[LLM, TinyModel]:
    """An engine with a tiny GLM-5, and its model. Its cache has 14 blocks: four long requests preempt."""
    model = tiny_model("glm-5-sparse")
    limits = {"max_model_len": 160, "block_size": 16, "num_gpu_blocks_override": 14}
    return engine(model.path, kv_cache_memory_bytes=1 << 20, **limits), model


def test_chosen_keys_of_one_request(sparse: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks, then with its prefix from the cache."""
    for prompt in PROMPTS[2:]:
        check(*sparse, [prompt])
    check(*sparse, PROMPTS[-1:])


def test_chosen_keys_in_mixed_batches(sparse: tuple[LLM, TinyModel]) -> None:
    """Prompts shorter and longer than the choice, in chunks, with requests that decode."""
    check(*sparse, PROMPTS)


def test_chosen_keys_after_preemption(sparse: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted, and go on with latents and keys of indexers that are made again."""
    llm, model = sparse
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, random_prompts(116, [60, 70, 50, 40]), 40)
    check_preempted(llm, before)
