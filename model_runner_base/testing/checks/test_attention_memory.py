"""Attention within its memory: contexts whose pairs would take twenty times as much are worked through in pieces."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_device_operations import shares_host_memory
from model_runner_base.testing.checks.test_long_contexts import OPTIONS
from model_runner_base.testing.engine import cache_bytes, check_hit, generate, greedy, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

NUM_REQS, LENGTH = 40, 2400
PREFIX, *ENDS = random_prompts(173, [LENGTH, *[8] * NUM_REQS])
BUDGET = 4 << 20
"""Bytes that attention may take at a time. All pairs of the requests' prompts together take over 400 MiB."""
REST = 60 << 20
"""Bytes that the rest of the steps may take, with what the process allocates while it runs them."""


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Yields a list, which holds at the end by how many bytes the process grew at most inside the block."""
    growth: list[int] = []
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # Else what the allocator kept of freed memory would be used again, and count as no growth.
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    yield growth
    growth.append(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_attention_memory(engine: Callable[..., LLM], text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Requests that share a long prefix, which the cache holds once and attention reads for each of them."""
    config: Any = text_engine().llm_engine.vllm_config.additional_config
    llm = engine(
        text_model.path,
        max_num_seqs=NUM_REQS,
        kv_cache_memory_bytes=cache_bytes(text_model.path, 4096),
        additional_config={**config, "attention_memory_gib": BUDGET / (1 << 30)},
        **OPTIONS,
    )
    generate(llm, [PREFIX], greedy(1))
    prompts = [PREFIX + end for end in ENDS]
    with peak_growth() as growth:
        outputs = generate(llm, prompts, greedy(6))
    check_equal(text_model, prompts[:6], tokens_of(outputs)[:6], [6] * 6)
    check_hit(all((output.num_cached_tokens or 0) > LENGTH - 100 for output in outputs))
    if shares_host_memory(llm):
        assert growth[0] < BUDGET + REST, (
            f"attention_memory_gib is {BUDGET >> 20} MiB, and steps took {growth[0] >> 20}"
        )
