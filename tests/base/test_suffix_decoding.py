"""Suffix decoding with the package that vLLM asks for, if that can be installed here; it has to be built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import engine

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, metric, tokens_of

PACKAGE = "arctic-inference==0.1.1"


@pytest.mark.full
def test_suffix_decoding(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that was seen before is drafted again, so later requests take few steps. vLLM names a missing package."""
    model, config = tiny_model("llama"), {"method": "suffix", "num_speculative_tokens": 4}
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), PACKAGE]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        with pytest.raises(ImportError, match=PACKAGE), engine(model.path, speculative_config=config):
            pass
        return
    monkeypatch.syspath_prepend(tmp_path)
    prompts = random_prompts(70, [3, 20, 70])
    with engine(model.path, enforce_eager=True, speculative_config=config) as llm:
        for _ in range(2):
            before = metric(llm, "vllm:spec_decode_num_accepted_tokens")
            for prompt, tokens in zip(prompts, tokens_of(generate(llm, prompts, greedy(30))), strict=True):
                assert tokens == model.greedy(prompt, 30)
        # The second time all has been seen: two thirds of it at least are right drafts.
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") - before > 60
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
        # The requests that finished last are still kept, since no step has told of their end.
        assert len(runner.parts.drafter._cache.active_requests) == len(prompts), "finished requests are left behind"
