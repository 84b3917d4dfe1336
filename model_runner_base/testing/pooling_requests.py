"""Requests of a pooling engine that arrive at any step, and checks of their values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import LLM, PoolingParams
from vllm.inputs import TokensPrompt

from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.mismatch import Mismatch, Wrong
from model_runner_base.testing.pooling import TOLERANCE, PoolingModel
from model_runner_base.testing.words import counted

Prompts = Sequence[Sequence[int]]


def task_of(llm: LLM, model: PoolingModel) -> str:
    """The model's own task; releases without scores call them classes."""
    return model.task if model.task in runner_of(llm).get_supported_tasks() else "classify"


def pool(
    llm: LLM, prompts: Prompts, task: str, params: PoolingParams | Sequence[PoolingParams] | None = None
) -> list[torch.Tensor]:
    """Values of prompts of token ids, as a user gets them."""
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    outputs = llm.encode(inputs, params, pooling_task=task, use_tqdm=False)  # type: ignore[arg-type]
    return [output.outputs.data for output in outputs]


def check_values(
    model: PoolingModel,
    prompts: Prompts,
    got: Sequence[torch.Tensor],
    task: str | None = None,
    activated: bool | None = None,
) -> None:
    """Asserts that values equal the reference's."""
    for prompt, value in zip(prompts, got, strict=True):
        name = f"prompt of {counted(len(prompt), 'token')}"
        check_value(value, model.value(prompt, task, activated), name, prompt, model.tolerance(task, activated))


def check_value(
    value: torch.Tensor, want: torch.Tensor, name: str, prompt: Sequence[int], tolerance: float = TOLERANCE
) -> None:
    wrong = Wrong(tuple(prompt), [])
    if value.shape != want.shape:
        raise Mismatch(f"{name}: {tuple(value.shape)}, not {tuple(want.shape)}", wrong)
    difference = float((value.float() - want).abs().max()) if want.numel() else 0.0
    if not difference < tolerance:  # NaN is not.
        raise Mismatch(f"{name}: off by {difference}, and by less than {tolerance:.2g} where it is right", wrong)


def check_pairs(llm: LLM, model: PoolingModel, pairs: Sequence[tuple[Sequence[int], int]]) -> None:
    """Asserts that prompts of two texts have the reference's values; a pair is the tokens, and where the second text
    begins."""
    params = [PoolingParams(extra_kwargs={"compressed_token_type_ids": second}) for _, second in pairs]
    prompts = [prompt for prompt, _ in pairs]
    for value, (prompt, second) in zip(pool(llm, prompts, task_of(llm, model), params), pairs, strict=True):
        want = model.value(prompt, second=second)
        check_value(
            value, want, f"prompt of {len(prompt)} tokens, the second text from {second} on", prompt, model.tolerance()
        )


def check_arrivals(
    llm: LLM,
    model: PoolingModel,
    prompts: Prompts,
    tasks: Sequence[str],
    rng: np.random.Generator,
    num_aborted: int = 0,
) -> None:
    """Asserts the values of requests that arrive at any step; some of them are aborted."""
    engine: Any = llm.llm_engine
    values: dict[int, torch.Tensor] = {}
    left, aborted = list(range(len(prompts))), rng.permutation(len(prompts))[:num_aborted].tolist()
    ids: dict[str, int] = {}
    while left or engine.has_unfinished_requests():
        for _ in range(int(rng.integers(0, 3))):
            if left:
                index = left.pop(0)
                prompt = TokensPrompt(prompt_token_ids=list(prompts[index]))
                engine.add_request(str(index), prompt, PoolingParams(task=tasks[index]))  # type: ignore[arg-type]
                ids[str(index)] = index
        for output in engine.step():
            values[ids[output.request_id]] = output.outputs.data
        if aborted and rng.random() < 0.5:
            engine.abort_request([str(aborted.pop())])
    assert len(values) >= len(prompts) - num_aborted
    for index, value in values.items():
        check_values(model, [prompts[index]], [value], tasks[index])
