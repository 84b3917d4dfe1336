"""Experts that later releases of vLLM would leave a part out of: biases of routers, and activations of transformers."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.checks.test_cache_formats import PROMPTS, check
from model_runner_base.testing.models import TinyModel


@pytest.mark.parametrize("architecture", ["laguna", "minimax-m3"])
def test_later_experts(architecture: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts of all lengths at once, in chunks, with requests that decode."""
    model = tiny_model(architecture)
    check(engine(model.path), model, PROMPTS)
