"""Blocks that come back from the host, with adapters, images, drafts, latents, ranks and preemption."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from greedy import expected, generate
from test_drafts_with_images import LORA, TEXT, ask_with, expected_with
from vllm import LLM
from vllm.config import KVTransferConfig

from model_runner_base.admission.kv_connectors import OFFLOADING
from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_multimodal import prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import cache_bytes, metric
from model_runner_base.testing.images import make_seeing_model
from model_runner_base.testing.models import TinyModel

HITS = "vllm:external_prefix_cache_hits"
PROMPTS = random_prompts(30, [90, 5, 33, 64, 120, 49])
EAGER: dict[str, Any] = {"enforce_eager": True, "max_model_len": 192, "block_size": 16}


def check(llm: LLM, ask: Callable[[], Any], wanted: Any) -> None:
    """Asks for the same again and again. From the second time on, blocks are on the host alone."""
    for turn in range(3):
        before = metric(llm, HITS)
        assert ask() == wanted
        assert not turn or metric(llm, HITS) > before
        for _ in range(3):
            generate(llm, PROMPTS[1:2])  # Stores begin with the next step, and hold their blocks until they are over.
            if llm.reset_prefix_cache():
                break
        else:
            raise AssertionError("blocks are still in use")


def test_adapters_images_and_drafts(tmp_path: Path) -> None:
    """No request gets blocks of another adapter, or of another image with the same placeholder tokens."""
    model = make_seeing_model("qwen3-vl", tmp_path)
    made = [make_adapter(model.path, tmp_path, n, 4 * n, EVERYWHERE, part=f"{TEXT}.layers") for n in (1, 2)]
    asked = [prompt for prompt in prompts(model) for _ in range(3)]
    adapters = [None, *made] * (len(asked) // 3)
    wanted = expected_with(model, asked, adapters)
    assert len({tuple(tokens) for _, tokens in wanted}) > len(wanted) // 2
    options = {"skip_tokenizer_init": False, "max_num_batched_tokens": 24, "kv_offloading_size": 0.01}
    drafts = speculation("ngram", TinyModel(model.path))
    with engine(model.path, enforce_eager=True, block_size=16, speculative_config=drafts, **options, **LORA) as llm:
        check(llm, lambda: ask_with(llm, asked, adapters), wanted)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.newest
def test_latents_on_two_ranks(tiny_model: Callable[[str], TinyModel]) -> None:
    """Memory of the host is divided by ranks, and each copies its own blocks."""
    model = tiny_model("deepseek-v2")
    with engine(model.path, **EAGER, tensor_parallel_size=2, kv_offloading_size=0.01) as llm:
        check(llm, lambda: generate(llm, PROMPTS), expected(model, PROMPTS))


@pytest.mark.parametrize("policy", ["lru", pytest.param("arc", marks=pytest.mark.newest)])
def test_chunks_of_blocks(policy: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """Three blocks a chunk, in a host's memory that holds a part of them, while requests are preempted."""
    model = tiny_model("llama")
    extra = {"cpu_bytes_to_use": cache_bytes(model.path, 480), "eviction_policy": policy, "block_size": 48}
    transfer = KVTransferConfig(kv_connector=OFFLOADING, kv_role="kv_both", kv_connector_extra_config=extra)
    memory = cache_bytes(model.path, 224)
    with engine(model.path, **EAGER, kv_transfer_config=transfer, kv_cache_memory_bytes=memory) as llm:
        for asked in (PROMPTS, random_prompts(33, [100, 70, 20, 110, 95]), PROMPTS):
            check(llm, partial(generate, llm, asked, 40), expected(model, asked, 40))
        assert metric(llm, "vllm:num_preemptions") > 0


@pytest.mark.once
def test_a_policy_that_ends_the_engine_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    """The manager of vLLM 0.16 looks for a block that it has just taken out."""
    extra = {"cpu_bytes_to_use": 1 << 20, "eviction_policy": "arc"}
    transfer = KVTransferConfig(kv_connector=OFFLOADING, kv_role="kv_both", kv_connector_extra_config=extra)
    with (
        pytest.raises(ValueError, match="eviction_policy=arc is not supported with this vLLM"),
        engine(tiny_model("llama").path, **EAGER, kv_transfer_config=transfer),
    ):
        pass
