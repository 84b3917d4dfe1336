"""Features that an attention kernel may leave out, and shapes that it may be wrong for."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
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


@pytest.mark.parametrize("architecture", FEATURES)
def test_features(architecture: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Groups of three heads, scores whose exponential is infinite, soft caps, sinks, ALiBi: in chunks and decode."""
    model = tiny_model(architecture)
    outputs = generate(engine(model.path), PROMPTS, greedy(COUNT))
    check_equal(model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where=FEATURES[architecture])
