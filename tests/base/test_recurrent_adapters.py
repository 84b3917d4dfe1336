"""LoRA adapters of models with recurrent layers: tokens of the model with the adapter merged into its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import engine
from test_lora import LORA, check

from model_runner_base.testing.adapters import ATTENTION, make_adapter
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.recurrent_architectures import RECURRENT

PROJECTIONS = {
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate", "gate"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "lfm2": ("in_proj", "out_proj", "w1", "w2", "w3"),
    "falcon-h1": ("in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    "granite-hybrid": ("in_proj", "out_proj", "input_linear", "output_linear"),
    "jamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
}
"""Matrices of recurrent layers, and of MLPs, by model; attention's come in addition."""


IN_BOTH_LANES = ("lfm2", "qwen3_5")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.once] * (name not in IN_BOTH_LANES))
        for name in PROJECTIONS
        if name in RECURRENT
    ],
)
def test_adapters(name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Two adapters and none in one batch: of all projections, and of the recurrent layers' alone."""
    model, projections = tiny_model(name), PROJECTIONS[name]
    adapters = [
        make_adapter(model.path, tmp_path, 1, targets=(*ATTENTION, *projections)),
        make_adapter(model.path, tmp_path, 2, rank=4, targets=projections),
    ]
    with engine(model.path, **LORA, enforce_eager=True) as llm:
        check(llm, model, adapters)
