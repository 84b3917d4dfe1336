"""Architectures of later releases of transformers: greedy tokens and log probabilities equal HF's in float32."""

from collections.abc import Callable

import pytest
from conftest import engine
from lane import HAS_OPENXLA
from test_architectures import PROMPTS, check
from test_latent_attention import largest_error

from model_runner_base.testing.architectures import LATER
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has none of them")
@pytest.mark.parametrize("name", [*LATER, "cohere2", "dbrx", "apertus", "arcee"])
def test_equals_transformers(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts in parts and mixed batches, longer than windows. The platform chooses the backend of Gemma 4, though vLLM
    would force its own, and the windows of Cohere 2 are the config's, though vLLM makes them wider. DBRX loads, though
    vLLM looks for its experts under other names. Apertus' activation has parameters of the model's dtype, though vLLM
    makes them in bfloat16. vLLM serves Arcee by transformers' class, and the reference still runs."""
    model = tiny_model(name)
    with engine(model.path, max_model_len=256, enforce_eager=True, max_logprobs=-1) as llm:
        check(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(12))))
        assert largest_error(llm, model, PROMPTS) < 2e-4
