"""Pooling models: the vector of a prompt is its own, however its tokens come, and whatever else is in the step."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM
from vllm.inputs import TokensPrompt

from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import check_preempted, metric
from model_runner_base.testing.pooling import PoolingModel, make_pooling_model
from model_runner_base.testing.pooling_requests import (
    check_arrivals,
    check_pairs,
    check_value,
    check_values,
    pool,
    task_of,
)

Start = Callable[..., LLM]
PROMPTS = random_prompts(80, [1, 2, 3, 17, 40, 64, 90, 128])
WHOLE = {"max_num_batched_tokens": 128, "max_model_len": 128}
FEW_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 128, "long_prefill_token_threshold": 16}
"""Limits with which requests that share the steps run out of blocks."""


@pytest.fixture(scope="session")
def pooling_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PoolingModel]:
    directory = tmp_path_factory.mktemp("pooling")
    return lambda name: make_pooling_model(name, directory)


@pytest.fixture
def decoder(engine: Start, pooling_model: Callable[[str], PoolingModel]) -> tuple[LLM, PoolingModel]:
    """An engine of a decoder, whose prompts come in chunks, and its model."""
    model = pooling_model("qwen3")
    return engine(model.path, **model.options, **FEW_BLOCKS, enable_prefix_caching=False), model


@pytest.mark.parametrize("name", ["qwen3", "llama-mean", "modernbert-classes"])
def test_mixed_batches(name: str, engine: Start, pooling_model: Callable[[str], PoolingModel]) -> None:
    """Prompts of all lengths, alone and at once; of the last model each token sees tokens after it."""
    model = pooling_model(name)
    limits = {**FEW_BLOCKS, "enable_prefix_caching": False} if name == "qwen3" else WHOLE
    llm = engine(model.path, **model.options, **limits)
    for prompt in PROMPTS[:4]:
        check_values(model, [prompt], pool(llm, [prompt], model.task))
    check_values(model, PROMPTS, pool(llm, PROMPTS, model.task))


def test_vectors_of_tokens(decoder: tuple[LLM, PoolingModel]) -> None:
    """A vector for each token of prompts that come in chunks, among vectors of whole prompts."""
    llm, model = decoder
    rng = np.random.default_rng(81)
    check_arrivals(llm, model, PROMPTS, ["token_embed", "embed"] * 4, rng)


def test_preemption(decoder: tuple[LLM, PoolingModel]) -> None:
    """Requests that are preempted between two chunks begin anew."""
    llm, model = decoder
    before = metric(llm, "vllm:num_preemptions")
    prompts = random_prompts(82, [128, 100, 90, 128, 110, 70, 128, 128])
    check_arrivals(llm, model, prompts, ["token_embed"] * 8, np.random.default_rng(83))
    check_preempted(llm, before)


def test_pairs(engine: Start, pooling_model: Callable[[str], PoolingModel]) -> None:
    """Scores of pairs of texts, whose tokens have types, among scores of single texts."""
    model = pooling_model("bert-reranker")
    llm = engine(model.path, **model.options, **WHOLE)
    check_pairs(llm, model, [(prompt, len(prompt) // 3) for prompt in PROMPTS])
    check_values(model, PROMPTS, pool(llm, PROMPTS, task_of(llm, model)))


@pytest.mark.parametrize("name", ["bert-tokens", "qwen2-process-reward"])
def test_classes_of_tokens(name: str, engine: Start, pooling_model: Callable[[str], PoolingModel]) -> None:
    """Classes of each token of prompts in one batch, or of each token that ends a step of a solution."""
    model = pooling_model(name)
    mark = model.options.get("pooler_config", {}).get("step_tag_id", 0)
    prompts = [tuple(mark if index % 5 == 3 else token for index, token in enumerate(each)) for each in PROMPTS]
    llm = engine(model.path, **model.options, **WHOLE)
    for prompt in prompts[3:5]:
        check_values(model, [prompt], pool(llm, [prompt], model.task))
    check_values(model, prompts, pool(llm, prompts, model.task))


def test_adapters(engine: Start, pooling_model: Callable[[str], PoolingModel], tmp_path: Path) -> None:
    """Vectors of requests with each of three adapters, and with none, in one batch with slots for two adapters."""
    model = pooling_model("qwen3")
    adapters = [make_adapter(model.path, tmp_path, number, targets=EVERYWHERE[:-1]) for number in (1, 2, 3)]
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
    llm = engine(model.path, **model.options, **lora, max_model_len=128)
    chosen = [(adapter, prompt) for prompt in PROMPTS for adapter in (None, *adapters)]
    prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for _, prompt in chosen]
    requests = [adapter and adapter.request for adapter, _ in chosen]
    outputs = llm.encode(prompts, pooling_task="embed", lora_request=requests, use_tqdm=False)  # type: ignore[arg-type]
    for (adapter, prompt), output in zip(chosen, outputs, strict=True):
        merged = PoolingModel(model.name, adapter.merged.path) if adapter else model
        name = f"prompt of {len(prompt)} tokens, with {adapter.name if adapter else 'no adapter'}"
        check_value(output.outputs.data, merged.value(prompt), name, prompt, merged.tolerance())
