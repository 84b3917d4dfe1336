"""Experts that later releases of vLLM would leave a part out of: biases of routers, and activations of transformers."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.checks.test_cache_formats import PROMPTS, check
from model_runner_base.testing.models import TinyModel


@pytest.mark.parametrize("architecture", ["laguna", "minimax-m3"])
def test_later_experts(
    architecture: str,
    engine: Callable[..., LLM],
    tiny_model: Callable[[str], TinyModel],
    request: pytest.FixtureRequest,
) -> None:
    """Prompts of all lengths at once, in chunks, with requests that decode."""
    if architecture == "minimax-m3":
        request.getfixturevalue("block_sparse_model")  # vLLM changes transformers' class, of which that one is, too.
    model = tiny_model(architecture)
    check(engine(model.path), model, PROMPTS)
