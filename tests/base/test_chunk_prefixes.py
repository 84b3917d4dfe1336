"""Prefixes of layers whose attention is in chunks: vLLM's search, corrected, against a brute-force one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from conftest import engine
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_architectures import check
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from model_runner_base.scheduling.corrections.prefixes import look_in_earlier_chunks
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, core_of, generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel

NULL = "null"


@settings(max_examples=examples(200), deadline=None)
@given(cached=st.sets(st.integers(0, 11)), limit=st.integers(0, 12), chunk=st.integers(1, 40), block=st.integers(1, 16))
def test_longest_prefix(cached: set[int], limit: int, chunk: int, block: int) -> None:
    """The longest prefix that has all blocks of its next token's chunk; blocks of earlier chunks are null."""
    look_in_earlier_chunks()
    spec = ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=chunk
    )
    pool = SimpleNamespace(
        hash_block_size=block,
        null_block=NULL,
        get_cached_block=lambda block_hash, groups: [block_hash] if block_hash in cached else None,
    )
    drops: dict[str, Any] = {"use_eagle" if "use_eagle" in parameters() else "drop_eagle_block": False}
    found = ChunkedLocalAttentionManager.find_longest_cache_hit(
        block_hashes=list(range(12)),  # type: ignore[arg-type]
        max_length=limit * block,
        kv_cache_group_ids=[0],
        block_pool=pool,  # type: ignore[arg-type]
        kv_cache_spec=spec,
        alignment_tokens=block,
        **drops,
    )
    blocks: Any = found if isinstance(found[0], list) else found[0]

    def needed(count: int) -> set[int]:
        return set(range(count * block // chunk * chunk // block, count))

    longest = max(count for count in range(limit + 1) if needed(count) <= cached)
    assert blocks[0] == [index if index in needed(longest) else NULL for index in range(longest)]


def parameters() -> tuple[str, ...]:
    """Parameters of vLLM's search, which are others in newer releases."""
    find: Any = ChunkedLocalAttentionManager.find_longest_cache_hit
    return getattr(find, "__wrapped__", find).__code__.co_varnames


def test_tokens_after_prefixes_with_gaps(tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts that ran before have the same tokens again, though some blocks of their prefixes are gone.

    Chunks have 24 tokens, blocks 16.
    """
    model, prompts = tiny_model("llama4"), random_prompts(1, [60, 70, 80, 90])
    with engine(
        model.path,
        max_model_len=256,
        enforce_eager=True,
        block_size=16,
        kv_cache_memory_bytes=cache_bytes(model.path, 700),
    ) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(100))
            check(model, prompts, tokens_of(outputs))
        assert any(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"
        assert len(core_of(llm).scheduler.kv_cache_config.kv_cache_groups) == 2
