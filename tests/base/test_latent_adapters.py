"""LoRA adapters of models with latent attention: tokens of the model with the adapter merged into its weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from test_lora import COMPILED, EAGER, LORA, Made, check
from test_reload import other_weights, reload_weights

from model_runner_base.inputs.adapters.latents import AdaptedProjection
from model_runner_base.models.layers.latent_attention import Projection
from model_runner_base.testing.adapters import make_adapter
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.models import TinyModel

Tiny = Callable[[str], TinyModel]
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = {
    "deepseek-v2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "glm4-moe-lite": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
"""Projections of attention; those of the shared and the dense MLPs come in addition."""
NAMES = [name for name in ATTENTION if not HAS_OPENXLA or name != "glm4-moe-lite"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, EAGER) for name in NAMES),
        pytest.param("deepseek-v3", COMPILED, marks=pytest.mark.openxla),
        pytest.param("deepseek-v2", EAGER | {"tensor_parallel_size": 2}, marks=pytest.mark.once),
    ],
    ids=[*NAMES, "compiled", "two ranks"],
)
def test_adapters(name: str, options: dict[str, Any], tiny_model: Tiny, tmp_path: Path) -> None:
    """Two adapters and none in one batch: of all matrices, and of parts of what vLLM keeps as one or absorbs.

    A projection that vLLM names twice would keep the model's own result, and a user would take it for the adapter's.
    """
    model = tiny_model(name)
    adapters = [
        make_adapter(model.path, tmp_path, 1, targets=(*ATTENTION[name], *MLP), without=".experts."),
        make_adapter(model.path, tmp_path, 2, rank=4, targets=("kv_a_proj_with_mqa", "kv_b_proj")),
    ]
    with engine(model.path, **LORA, **options) as llm:
        before = compilations()
        check(llm, model, adapters)
        assert compilations() == before


def test_new_weights_beneath_adapters(tiny_model: Tiny, tmp_path: Path) -> None:
    """An adapter of the absorbed projection adds to the weights that a reload brings."""
    model = tiny_model("deepseek-v2")
    new = other_weights(model, tmp_path / "new")
    old_one = make_adapter(model.path, tmp_path, 3, targets=("kv_b_proj", "q_proj"))
    adapters = [replace(old_one, model=new.path), replace(old_one, model=new.path)]  # The same files.
    with engine(model.path, **LORA, **EAGER) as llm:
        check(llm, model, [old_one, old_one])
        reload_weights(llm, weights_path=str(new.path))
        check(llm, new, adapters)


@pytest.mark.once
def test_memory_of_an_absorbed_projection(tiny_model: Tiny) -> None:
    """Memory that is counted for its adapters holds what they make in a step, and not twice that."""
    num_tokens = 64
    with engine(tiny_model("deepseek-v2").path, **LORA, **EAGER) as llm:
        adapters = runner_of(llm).adapters
        slotted: Any = next(each for name, each in adapters._slots.slotted.items() if name.endswith("kv_b_proj"))
        method = slotted.layer.base_layer.quant_method
        projection = AdaptedProjection(Projection(slotted.layer.base_layer), slotted.layer)
        sizes = {"to_latents": method.sizes[0], "from_latents": slotted.layer.input_size}
        made = []
        with torch.no_grad(), adapters.unused(num_tokens, 4):
            for name, size in sizes.items():
                with Made() as counted:
                    getattr(projection, name)(torch.zeros(num_tokens, method.num_heads, size))
                made.append(counted.bytes)
        assert max(made) <= slotted.products_memory(num_tokens, 4) < 2 * max(made)
