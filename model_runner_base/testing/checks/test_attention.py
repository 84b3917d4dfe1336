"""Features that a kernel may leave out, and shapes and scalars that it may be wrong for."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.architectures import SHORT_WINDOW
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, generate, greedy, require_small_blocks, tokens_of
from model_runner_base.testing.logprobs import check_values
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
Tiny = Callable[[str], TinyModel]
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
def test_features(architecture: str, engine: Start, tiny_model: Tiny) -> None:
    """Groups of three heads, scores whose exponential is infinite, soft caps, sinks, ALiBi: in chunks and decode."""
    model = tiny_model(architecture)
    outputs = generate(engine(model.path), PROMPTS, greedy(COUNT))
    check_equal(model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where=FEATURES[architecture])


# Each has a check of its own, since the profile smoke runs the first case of each check alone.


def test_scalars(engine: Start, tiny_model: Tiny) -> None:
    """RMSNorm with an eps of 1e-3, and rotary positions with a theta of 500."""
    check_unusual("unusual-scalars", "RMSNorm with an eps of 1e-3, a rotary theta of 500", engine, tiny_model)


def test_scales(engine: Start, tiny_model: Tiny) -> None:
    """Embeddings, residuals, scores and logits that are multiplied, as Granite's and other models' of muP."""
    check_unusual("scales", "scales of embeddings, residuals, scores and logits", engine, tiny_model)


def test_rotary_style(engine: Start, tiny_model: Tiny) -> None:
    """Rotary positions that turn neighbours in half of a head, as GLM 4's do."""
    check_unusual("interleaved-rotary", "interleaved rotary positions in half of a head", engine, tiny_model)


def test_short_window(engine: Start, tiny_model: Tiny) -> None:
    """A window that is shorter than the prompts, in chunks and in decode."""
    check_unusual("short-window", f"a window of {SHORT_WINDOW} tokens", engine, tiny_model)


def check_unusual(name: str, feature: str, engine: Start, tiny_model: Tiny) -> None:
    """Compares tokens, and log probabilities of all prompt and output tokens: a scalar moves most of them little."""
    model = tiny_model(name)
    llm = engine(model.path, max_logprobs=-1)
    outputs = generate(llm, PROMPTS, greedy(COUNT, logprobs=0, prompt_logprobs=0))
    check_equal(model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where=feature)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_values(model, prompt, output, feature)


def test_high_block_ids(engine: Start, text_model: TinyModel) -> None:
    """Blocks with ids above 32,767, as a large cache has."""
    require_small_blocks("there are few blocks")
    llm = engine(text_model.path, num_gpu_blocks_override=HIGHEST_INT16 + 100)
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(HIGHEST_INT16)
    outputs = generate(llm, PROMPTS, greedy(COUNT))
    pool.free_blocks(others)
    check_equal(text_model, PROMPTS, tokens_of(outputs), [COUNT] * len(PROMPTS), where="blocks with ids above 32,767")
