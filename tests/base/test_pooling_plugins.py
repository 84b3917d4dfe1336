"""Plugins that prepare the prompts of a pooling model, and make one answer of its values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from vllm import LLM, PoolingParams, PoolingRequestOutput
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.plugins import io_processors
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.tasks import POOLING_TASKS

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.pooling import TOLERANCE, make_pooling_model

TEXTS = random_prompts(96, [3, 20, 64, 128])
CHOOSES_TASK = "score" not in POOLING_TASKS
"""Whether a plugin of this release chooses the task of its requests; before, a request names it."""


class Cosines(IOProcessor):
    """Plugin that takes lists of token ids, and answers with the cosines of the first text and the others."""

    def parse_request(self, request: Any) -> Any:
        return request["data"]

    def parse_data(self, data: object) -> Any:
        return data

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompt]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="embed")

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> torch.Tensor:
        first, *others = (output.outputs.data for output in model_output)
        return torch.stack(others) @ first

    def output_to_response(self, plugin_output: torch.Tensor) -> Any:
        raise NotImplementedError


def answer(llm: LLM, task: str) -> list[PoolingRequestOutput]:
    return llm.encode({"data": TEXTS}, pooling_task=task, use_tqdm=False)  # type: ignore[arg-type]


def test_a_plugin_makes_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_pooling_model("qwen3", tmp_path)
    name = f"{Cosines.__module__}.{Cosines.__qualname__}"
    monkeypatch.setattr(io_processors, "load_plugins_by_group", lambda group: {"cosines": lambda: name})
    limits = {"max_model_len": 128, "max_num_batched_tokens": 32, "enforce_eager": True}
    with engine(model.path, **model.options, **limits, io_processor_plugin="cosines") as llm:
        (got,) = answer(llm, "plugin" if CHOOSES_TASK else "embed")
        first, *others = (model.value(ids) for ids in TEXTS)
        assert (got.outputs - torch.stack(others) @ first).abs().max() < TOLERANCE
        with pytest.raises((ValueError, VLLMValidationError), match="Unsupported task: 'plugin'"):
            llm.llm_engine.add_request("0", TokensPrompt(prompt_token_ids=[5]), PoolingParams(task="plugin"))
