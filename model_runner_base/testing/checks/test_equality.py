"""Greedy tokens equal HF transformers in float32, whatever the scheduler does with the requests."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel


@pytest.mark.parametrize("length", [1, 7, 64])
def test_one_prompt(length: int, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """A prompt on its own continues as HF transformers continues it."""
    model = tiny_model("llama")
    prompt = tuple(range(3, 3 + length))
    (tokens,) = tokens_of(generate(engine(model.path), [prompt], greedy(20)))
    want = model.greedy(prompt, 20)
    assert tokens == want, f"prompt {list(prompt)}: {tokens} is not {want}"
