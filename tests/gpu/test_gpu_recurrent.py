"""Recurrent layers on the GPU runner: vLLM's own layers, metadata builders and kernels, in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counts import IS_FULL
from test_gpu_runner import run

from gpu_runner.worker import check_model
from model_runner_base.admission.hybrid_config import check_kernels
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.recurrent import HAS_OTHER_DELTA_KERNELS

SERVE = """
import sys
from model_runner_base.testing.platform_choice import choose_platform
choose_platform(f"cuda_stand_in.{sys.argv[1]}")
from pathlib import Path
import cuda_stand_in
import numpy as np
import torch
from vllm import LLM
from model_runner_base.models.recurrent.layers import states_of
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.engine import DEFAULTS, runner_of, shut_down
from model_runner_base.testing.models import make_checkpoint
from model_runner_base.vllm_compat.types.recurrent import recurrent_layers

prompts, rng = random_prompts(93, [1, 2, 40, 1, 17]), np.random.default_rng(5)
for name in sys.argv[4:]:
    model = make_checkpoint(name, Path(sys.argv[3]))
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 16}
    options |= {"kv_cache_memory_bytes": 4 << 20, "async_scheduling": sys.argv[2] == "async"}
    if name == "mamba":
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2]}  # Steps of three requests have no graph.
    llm = LLM(str(model.path), worker_cls="cuda_stand_in.StandInWorker", **DEFAULTS | options)
    for layer in recurrent_layers(runner_of(llm).vllm_config).values():
        for state in states_of(layer):
            state.fill_(torch.nan)  # What others left in a state reaches no request.
    num_captured = len(cuda_stand_in.RecordedGraph.captured)
    assert num_captured, "steps of decode are graphs"
    counts = rng.integers(1, 6, len(prompts)).tolist()
    check_equal(model, prompts, run_with_arrivals(llm, prompts, counts, rng), counts)
    check_equal(model, prompts[2:4], run_with_resets(llm, prompts[2:4], 8), [8] * 2)
    assert num_captured == len(cuda_stand_in.RecordedGraph.captured)
    cuda_stand_in.RecordedGraph.captured.clear()
    del llm
    shut_down()
    print("EQUAL", name, flush=True)
"""
MAMBA = ["mamba"] if IS_FULL else []  # Triton's interpreter takes two minutes for it.
DELTA_NETS = [] if HAS_OTHER_DELTA_KERNELS else ["qwen3-next"]


@pytest.mark.parametrize(
    ("platform", "scheduling", "models"),
    [
        pytest.param("PlanningPlatform", "async", ["lfm2", *DELTA_NETS], marks=pytest.mark.once),
        pytest.param("KernelPlatform", "sync", ["granite-hybrid", *MAMBA], marks=pytest.mark.newest),
    ],
)
def test_equals_transformers(platform: str, scheduling: str, models: list[str], tmp_path: Any) -> None:
    """Requests that arrive at any step, in chunks and mixed steps, preempted or aborted, in states that others have
    left or NaN, get the tokens of transformers: also a prompt of one token, whose step is a captured decode."""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = run("-c", SERVE, platform, scheduling, tmp_path, *models, **environment)
    assert [line for line in out.splitlines() if line.startswith("EQUAL")] == [f"EQUAL {name}" for name in models]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_config.architecture": "MiniMaxText01ForCausalLM"}, "MiniMaxText01ForCausalLM was not tried with"),
        ({"cache_config.enable_prefix_caching": True}, "prefix caching is .* set enable_prefix_caching=False"),
        ({"speculative_config": SimpleNamespace()}, "speculative decoding is .* leave out speculative_config"),
        ({"lora_config": SimpleNamespace()}, "adapters are .* leave out enable_lora"),
        ({"cache_config.use_replayssm": True}, "leave out use_replayssm"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    """Refuses what the kernels are not served with, before anything is loaded."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(architecture="Lfm2ForCausalLM", is_multimodal_model=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False, use_replayssm=False),
        speculative_config=None,
        lora_config=None,
    )
    check_kernels(config)
    for path, value in values.items():
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_kernels(config)


def test_gated_delta_nets_take_no_float32() -> None:
    """vLLM's kernel of their chunks would fail at the first prompt."""
    text = SimpleNamespace(linear_num_value_heads=4)
    model: Any = SimpleNamespace(
        is_encoder_decoder=False, is_mm_prefix_lm=False, hf_text_config=text, dtype=torch.bfloat16
    )
    check_model(model)
    model.dtype = torch.float32
    with pytest.raises(UnsupportedConfigError, match="no float32: set dtype=bfloat16"):
        check_model(model)
