"""An engine starts by the device's memory figures alone."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM

from model_runner_base.device_ops import MemoryInfo
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_device_operations import shares_host_memory
from model_runner_base.testing.engine import core_of, generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]
WIDE = 1 << 15
"""Intermediate size of a model whose weights, 48 MiB in float32, stand out of what else a start takes."""


def runner_and_memory(llm: LLM) -> tuple[type, MemoryInfo]:
    """The runner's class, and the device's memory while this engine has its part."""
    runner = runner_of(llm)
    return type(runner), runner.device_ops.memory_info()


def test_start_by_figures(text_engine: Start, text_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts by the device's figures, without kv_cache_memory_bytes, and serves a long request."""
    cls, memory = runner_and_memory(text_engine())
    profile_run, found = cls.profile_run, []  # type: ignore[attr-defined]

    def profile(self: Any) -> int:
        found.append(profile_run(self))
        return found[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(cls, "profile_run", profile)
    # Other processes may use the device too.
    share = memory.free / memory.total / 2 if memory.total else 0.5
    try:
        llm = text_engine(kv_cache_memory_bytes=None, gpu_memory_utilization=share)
    except ValueError as error:
        if "does not report its memory" not in str(error):
            raise
        raise NotImplementedError(f"a start by memory figures is not supported: {error}") from error
    assert found, "the engine started without profile_run"
    needed, total = found[-1], memory.total
    is_right = isinstance(needed, int) and needed > 0 and (not total or needed < total)
    assert is_right, f"profile_run: a step needs {needed} bytes of {total}"
    config = llm.llm_engine.vllm_config
    num_tokens = core_of(llm).scheduler.kv_cache_config.num_blocks * config.cache_config.block_size
    assert num_tokens >= config.model_config.max_model_len, f"the KV cache holds {num_tokens} tokens"
    prompts = random_prompts(41, [200, 30])
    check_equal(text_model, prompts, tokens_of(generate(llm, prompts, greedy(12))), [12, 12])


def test_weights_are_taken(text_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model takes its weights of the free memory, if the device has memory of its own."""
    llm = text_engine()
    cls, memory = runner_and_memory(llm)
    if shares_host_memory(llm) or not memory.total:
        return
    load_model, found = cls.load_model, []  # type: ignore[attr-defined]

    def load(self: Any) -> None:
        before = self.device_ops.memory_info().free
        load_model(self)
        self.device_ops.synchronize()
        found.append(before - self.device_ops.memory_info().free)

    monkeypatch.setattr(cls, "load_model", load)
    llm = text_engine(load_format="dummy", hf_overrides={"intermediate_size": WIDE})
    weights = sum(weight.nbytes for weight in runner_of(llm).model.parameters())
    (taken,) = found
    assert taken > weights * 0.9, f"weights of {weights} bytes lower the free memory of memory_info by {taken}"
