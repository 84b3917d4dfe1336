"""Keys and values of unequal head sizes (MiMo-V2): tokens and log probabilities equal HF transformers in float32.

A user would notice a wrong token after a window, in a prefix from the cache, or a cache that takes more memory than its
keys and values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import engine
from lane import HAS_OPENXLA
from test_latent_attention import caches_of, largest_error
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.testing.architectures import WINDOW
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.engine import core_of, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

pytestmark = pytest.mark.skipif(HAS_OPENXLA, reason="this release of vLLM pads values, and transformers has no class")

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(120, [1, 2, 5, 16, 33, 64, 90, 130, 200])
NEW_TOKENS = 16
# From this field vLLM takes a window of as many tokens, and transformers one of one more.
OPTIONS: dict[str, Any] = {
    "hf_overrides": {"sliding_window_size": WINDOW},
    "kv_cache_memory_bytes": 1 << 20,
    "enforce_eager": True,
    "max_logprobs": -1,
}


def check(llm: Any, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def test_equals_transformers(tiny_model: Tiny) -> None:
    """Prompts in chunks and mixed batches, longer than windows, then with their prefixes from the cache."""
    model = tiny_model("mimo-v2")
    with engine(model.path, **OPTIONS) as llm:
        assert len(runner_of(llm).parts.block_tables) > 1, "layers with a window have no group of their own"
        check(llm, model, PROMPTS)
        outputs = generate(llm, PROMPTS[-2:], greedy(NEW_TOKENS))
        check_equal(model, PROMPTS[-2:], tokens_of(outputs), [NEW_TOKENS] * 2)
        assert all(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"
        assert largest_error(llm, model, PROMPTS) < 2e-4


def test_small_steps(tiny_model: Tiny) -> None:
    """Chunks of 16 tokens; requests that arrive at any step; some are aborted, or all preempted every 30 steps."""
    model, rng = tiny_model("mimo-v2"), np.random.default_rng(4)
    with engine(model.path, **OPTIONS, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
        check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, counts, rng), counts)
        check_equal(model, PROMPTS[:6], run_with_resets(llm, PROMPTS[:6], NEW_TOKENS), [NEW_TOKENS] * 6)


def test_cache_has_no_padding(tiny_model: Tiny) -> None:
    """The cache holds the numbers that arithmetic says, 24 of a key and 16 of a value; few blocks preempt requests."""
    model, num_blocks = tiny_model("mimo-v2"), 14
    # Two layers with 4 KV heads, and in the same memory two with 2, in blocks of twice as many tokens.
    num_bytes = num_blocks * 2 * 16 * 4 * (24 + 16) * 4
    options = OPTIONS | {"kv_cache_memory_bytes": num_bytes}
    with engine(model.path, **options, block_size=16, max_model_len=128) as llm:
        assert core_of(llm).scheduler.kv_cache_config.num_blocks == num_blocks
        tensors = {cache.data_ptr(): cache.numel() * cache.itemsize for cache in caches_of(llm)}
        assert sum(tensors.values()) == num_bytes
        check(llm, model, random_prompts(111, [60, 70, 50, 40]), 40)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 256, "block_size": 256},
        {"disable_hybrid_kv_cache_manager": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    ],
    ids=["contiguous", "one-group", "drafts"],
)
def test_in_other_caches_and_with_drafts(options: dict[str, Any], tiny_model: Tiny) -> None:
    model = tiny_model("mimo-v2")
    with engine(model.path, **OPTIONS | {"kv_cache_memory_bytes": 8 << 20}, **options) as llm:
        check(llm, model, PROMPTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_backend": "TRITON_ATTN_DIFFKV"}, "attention backend TRITON_ATTN_DIFFKV does not run here"),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
            "drafts by mtp are not supported with MiMoV2FlashForCausalLM yet",
        ),
    ],
)
def test_what_is_not_served_is_refused(options: dict[str, Any], words: str, tiny_model: Tiny) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs(str(tiny_model("mimo-v2").path), **OPTIONS | options).create_engine_config()
