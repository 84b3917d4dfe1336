"""Architectures of later releases of transformers: greedy tokens and log probabilities equal HF's in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import engine
from lane import HAS_OPENXLA
from test_architectures import PROMPTS, check
from test_latent_attention import largest_error
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.testing.architectures import LATER, hf
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has none of them")
@pytest.mark.parametrize("name", [*LATER, "cohere2", "dbrx", "apertus", "arcee", "laguna", "minimax-m3", "youtu"])
def test_equals_transformers(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts in parts and mixed batches, longer than windows. The platform chooses the backend of Gemma 4, though vLLM
    would force its own, and the windows of Cohere 2 are the config's, though vLLM makes them wider. DBRX loads, though
    vLLM looks for its experts under other names. Apertus' activation has parameters of the model's dtype, though vLLM
    makes them in bfloat16. vLLM serves Arcee by transformers' class, and the reference still runs. Biases of Laguna's
    routers are loaded, though vLLM leaves them out. Experts of MiniMax M3 have an activation that clamps, though vLLM's
    Transformers backend would have them compute SwiGLU."""
    model = tiny_model(name)
    with engine(model.path, max_model_len=256, enforce_eager=True, max_logprobs=-1) as llm:
        check(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(12))))
        assert largest_error(llm, model, PROMPTS) < 2e-4


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no such class")
def test_sparse_layers_by_the_transformers_backend_are_refused(tmp_path: Path) -> None:
    """vLLM would have MiniMax M3's sparse layers see all keys."""
    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    config = hf.MiniMaxM3VLTextConfig(num_hidden_layers=2, architectures=["MiniMaxM3VLForCausalLM"], **sparse)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers of type minimax_m3_sparse are not supported by vLLM's Transformers"):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
