"""Guard that a step runs in: it turns gradients off, and ends a rank whose error would not be heard of."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from gpu_runner.model_runner import GPUModelRunner
from model_runner_base import ModelRunnerBase
from model_runner_base.step.guard import StepGuard, guarded, in_forward_context
from neuron_runner.model_runner import NeuronModelRunner

CONTEXT: Any = object()


class Ended(BaseException):
    """Error that is raised in place of the process's end."""


@guarded
@in_forward_context
def half(runner: Any, error: type[BaseException] | None) -> bool:
    assert get_forward_context() is CONTEXT
    if error is not None:
        raise error
    return torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("rank", "error", "seen"),
    [
        (0, ValueError, ValueError),
        (1, ValueError, Ended),
        # The user's, and not a fault of this rank alone.
        (1, KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_a_rank_that_nobody_hears_of_ends_its_process(
    rank: int, error: type[BaseException], seen: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    runner = SimpleNamespace(step_guard=StepGuard(rank), parts=SimpleNamespace(forward_context=CONTEXT))
    with pytest.raises(seen):
        half(runner, error)
    assert torch.is_grad_enabled(), "the mode outlasts the step"
    assert not is_forward_context_available(), "the forward context outlasts the step"
    assert not half(runner, None)


@pytest.mark.parametrize("runner", [ModelRunnerBase, GPUModelRunner, NeuronModelRunner])
def test_ray_meets_the_guard_past_the_worker(runner: type[ModelRunnerBase]) -> None:
    """The guard is met on the runner, as vLLM's Ray executor calls its halves of a step, and no worker's."""
    for name in ("execute_model", "sample_tokens"):
        assert getattr(runner, name).__code__ is half.__code__, f"{name} is not guarded"
