"""Caches of other numbers than keys and values in the model's dtype: latents (MLA), and numbers of 8 bits."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cache_scales import enlarge_keys_and_values
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, tokens_of
from model_runner_base.testing.images import FAMILIES, make_seeing_model
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.rounding import SCALES, TEXT_ALONE, Scales, changed, check_rounded, enlarge_values

Start = Callable[..., LLM]
Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(115, [1, 2, 5, 16, 33, 64, 90, 130])
NEW_TOKENS = 16
SCALED_FAMILIES = [name for name in ("qwen3-vl", "falcon-h1", "nemotron-h", "qwen3.5") if name in FAMILIES | RECURRENT]
"""Families whose files have other names of layers than vLLM, as far as this release of transformers has them."""


@pytest.fixture
def latents(engine: Start, tiny_model: Tiny) -> tuple[LLM, TinyModel]:
    """An engine with latent attention, and its model. Its cache has 14 blocks: four long requests preempt."""
    model = tiny_model("deepseek-v2")
    limits = {"max_model_len": 160, "block_size": 16, "num_gpu_blocks_override": 14}
    return engine(model.path, kv_cache_memory_bytes=1 << 20, **limits), model


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def test_latents_of_one_request(latents: tuple[LLM, TinyModel]) -> None:
    """A request on its own, its prompt cut into chunks, then with its prefix from the cache."""
    for prompt in PROMPTS:
        check(*latents, [prompt])
    check(*latents, PROMPTS[-1:])


def test_latents_in_mixed_batches(latents: tuple[LLM, TinyModel]) -> None:
    """Prompts of all lengths at once, in chunks, with requests that decode."""
    check(*latents, PROMPTS)


def test_latents_after_preemption(latents: tuple[LLM, TinyModel]) -> None:
    """Requests that are preempted, and go on with latents that are made again."""
    llm, model = latents
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, random_prompts(116, [60, 70, 50, 40]), 40)
    check_preempted(llm, before)


def test_eight_bits(engine: Start, tiny_model: Tiny) -> None:
    """Keys and values of 8 bits, divided by the checkpoint's scales; numbers that are too large stay finite."""
    plain = tiny_model("llama")
    model = changed(plain, plain.path.with_name("llama-scaled"), enlarge_values)
    check_rounded(engine(model.path, kv_cache_dtype="fp8", max_logprobs=-1), model, PROMPTS, "fp8", SCALES)


@pytest.mark.parametrize("name", SCALED_FAMILIES)
def test_scales_by_family(name: str, engine: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Scales reach their layers where a file names these otherwise than vLLM does."""
    directory = tmp_path_factory.mktemp("scales")
    make = make_seeing_model if name in FAMILIES else make_checkpoint
    plain = TinyModel(make(name, directory).path)
    scales: Scales = {}
    model = changed(plain, directory / "scaled", lambda weights: scales.update(enlarge_keys_and_values(weights)))
    options = TEXT_ALONE if name in FAMILIES else {}
    llm = engine(model.path, kv_cache_dtype="fp8", max_logprobs=-1, **options)
    check_rounded(llm, model, PROMPTS, "fp8", scales)
