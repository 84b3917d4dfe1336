"""Features that an attention kernel may leave out, and shapes that it may be wrong for."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, generate, greedy, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

FEATURES = {
    "three-heads-a-group": "groups of three heads, with a head size of 80",
    "large-scores": "scores whose exponential is infinite",
    "gemma2": "soft caps",
    "gpt-oss": "sinks",
    "bloom": "ALiBi",
}
"""Feature of each model's attention, by the name of its configuration."""
PROMPTS = random_prompts(180, [5, 33, 70, 130])
COUNT = 20
HIGHEST_INT16 = 32_767


@pytest.mark.parametrize("architecture", FEATURES)
def test_features(architecture: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Groups of three heads, scores whose exponential is infinite, soft caps, sinks, ALiBi: in chunks and decode."""
    model = tiny_model(architecture)
    outputs = generate(engine(model.path), PROMPTS, greedy(COUNT))
    check_equal(model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where=FEATURES[architecture])


def test_high_block_ids(engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Blocks with ids above 32,767, as a large cache has."""
    llm = engine(text_model.path, num_gpu_blocks_override=HIGHEST_INT16 + 100)
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(HIGHEST_INT16)
    outputs = generate(llm, PROMPTS, greedy(COUNT))
    pool.free_blocks(others)
    check_equal(text_model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where="blocks with ids above 32,767")
