"""Profiles of a running engine, by vLLM's profiler."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import engine
from greedy import expected, generate
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel

HAS_PREFIX = "profile_prefix" in inspect.signature(LLM.start_profile).parameters
"""Whether this release names the file of a profile."""


def test_profile_is_written(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A profile is written as ``profiler_config`` asks, with what ran in between. Without it the call says what to
    set."""
    model = tiny_model("llama")
    prompts = random_prompts(64, [5, 9])
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    with engine(model.path, max_model_len=128, enforce_eager=True, profiler_config=config) as llm:
        llm.start_profile()
        assert generate(llm, prompts) == expected(model, prompts)
        llm.stop_profile()
        (trace,) = tmp_path.glob("*.json")
        prefix = {"profile_prefix": "mine"} if HAS_PREFIX else {}
        llm.start_profile(**prefix)
        llm.llm_engine.engine_core.shutdown()
        assert len(list(tmp_path.glob("*.json"))) == 2, "what still ran when the engine ended was not written"
        assert len(list(tmp_path.glob("mine*.json"))) == len(prefix)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::linear"} & names
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        with pytest.raises(Exception, match="set --profiler-config"):
            llm.start_profile()
        assert generate(llm, prompts) == expected(model, prompts)
