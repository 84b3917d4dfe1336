"""The hooks of the GPU runner: which there are, weights that are offloaded, what a step is said to need."""

import ast
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_plain_device import code_lines
from test_structure import HOOKS, ROOT
from torch import nn
from vllm.config import CompilationMode

import gpu_runner.cuda_graphs
import gpu_runner.device_ops
import gpu_runner.model_runner
from gpu_runner.model_runner import GPUModelRunner


def test_runner_overrides_exactly_the_hooks() -> None:
    path = ROOT / "gpu_runner" / "model_runner.py"
    (runner,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in runner.body if isinstance(node, ast.FunctionDef)} == HOOKS
    assert code_lines(path) < 120


def offload_budget() -> int:
    """Bytes of weights that a model which is made now leaves on the host."""
    if find_spec("vllm.model_executor.offloader"):
        offloader = import_module("vllm.model_executor.offloader").get_offloader()
        return getattr(offloader, "cpu_offload_max_bytes", 0)
    return import_module("vllm.model_executor.models.utils")._CPU_OFFLOAD_MAX_BYTES


def offload_options(gib: float) -> dict[str, Any]:
    """What the config says of it: an object of its own, or a number beside the cache's."""
    if find_spec("vllm.config.offload"):
        config = import_module("vllm.config.offload")
        return {"offload_config": config.OffloadConfig(uva=config.UVAOffloadConfig(cpu_offload_gb=gib))}
    return {"cache_config": SimpleNamespace(cpu_offload_gb=gib)}


def test_weights_are_offloaded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's models, which go by the budget that stands when they are made; the next engine has its own."""
    budgets = []

    def load(*args: Any, **options: Any) -> nn.Module:
        budgets.append(offload_budget())
        return nn.Identity()

    monkeypatch.setattr(gpu_runner.model_runner, "load_checkpoint", load)
    for gib in (1.5, 0):
        config = SimpleNamespace(
            **offload_options(gib),
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
            speculative_config=None,
        )
        runner = SimpleNamespace(vllm_config=config, device=torch.device("cpu"))
        GPUModelRunner.load_model(runner)  # type: ignore[arg-type]
    assert budgets == [3 << 29, 0]


@pytest.mark.parametrize("has_embeds", [False, True])
def test_the_pool_of_prompt_embeddings_is_part_of_what_a_step_needs(has_embeds: bool) -> None:
    """It is allocated after the measurement: 8 tokens of 24 float32, a row of padding, and 8 on their way to it."""
    model_config = SimpleNamespace(enable_prompt_embeds=has_embeds, get_inputs_embeds_size=lambda: 24)
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(peak_memory=lambda run: 1000),
        model_config=model_config,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    needed = GPUModelRunner.profile_run(runner)  # type: ignore[arg-type]
    assert needed == 1000 + (torch.zeros(8 + 1 + 8, 24).nbytes if has_embeds else 0)
