"""Quantised checkpoints: tokens are those of the weights that the checkpoint stands for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.gguf_files import write_gguf
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import EXAMPLES, write_checkpoints

PROMPTS = random_prompts(31, [5, 30, 70])
NEW_TOKENS = 16


@pytest.mark.parametrize("name", EXAMPLES)
def test_quantised_checkpoints(
    name: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """A quantised checkpoint has the tokens of its dequantised weights: FP8 in blocks, MXFP4, GPTQ in act order."""
    kind, scheme = EXAMPLES[name]
    quantised, plain = write_checkpoints(tiny_model(kind), scheme, tmp_path, has_shards=True)
    # Loading is under test, and graphs of three models may take minutes to compile.
    llm = engine(quantised.path, enforce_eager=True)
    outputs = generate(llm, PROMPTS, greedy(NEW_TOKENS))
    check_equal(plain, PROMPTS, tokens_of(outputs), [NEW_TOKENS] * len(PROMPTS))


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_gguf_files(
    name: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """A GGUF file has the tokens of its dequantised weights: rotary rows in llama.cpp's order, stacked experts."""
    pytest.importorskip("gguf")
    path, plain = write_gguf(tiny_model(name), tmp_path)
    llm = engine(path, enforce_eager=True)
    outputs = generate(llm, PROMPTS, greedy(NEW_TOKENS))
    check_equal(plain, PROMPTS, tokens_of(outputs), [NEW_TOKENS] * len(PROMPTS))
