"""An engine starts by the device's memory figures alone."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM
from vllm.utils.import_utils import resolve_obj_by_qualname

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, generate, greedy, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel

Start = Callable[..., LLM]


def test_start_by_figures(
    text_engine: Start, text_model: TinyModel, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine starts by the device's figures, without kv_cache_memory_bytes, and serves a long request."""
    cls = resolve_obj_by_qualname(pytestconfig.getoption("worker")).model_runner_cls
    profile_run, found = cls.profile_run, []

    def profile(self: Any) -> int:
        found.append(profile_run(self))
        return found[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(cls, "profile_run", profile)
    try:
        llm = text_engine(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    except ValueError as error:
        if "does not report its memory" not in str(error):
            raise
        raise NotImplementedError(f"a start by memory figures is not supported: {error}") from error
    (needed,), total = found, runner_of(llm).device_ops.memory_info().total
    is_right = isinstance(needed, int) and needed > 0 and (not total or needed < total)
    assert is_right, f"profile_run: a step needs {needed} bytes of {total}"
    config = llm.llm_engine.vllm_config
    num_tokens = core_of(llm).scheduler.kv_cache_config.num_blocks * config.cache_config.block_size
    assert num_tokens >= config.model_config.max_model_len, f"the KV cache holds {num_tokens} tokens"
    prompts = random_prompts(41, [200, 30])
    expected = [text_model.greedy(prompt, 12) for prompt in prompts]
    assert tokens_of(generate(llm, prompts, greedy(12))) == expected
