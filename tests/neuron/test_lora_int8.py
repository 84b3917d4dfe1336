"""LoRA adapters over int8 weights, whose products stay exact: HF with rounded weights and the adapter merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from test_quantization import INT8, rounded_checkpoint

from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.checks.test_lora import greedy_requests, run
from model_runner_base.testing.models import TinyModel
from neuron_runner.metrics import CompilationCount


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["compiled", "eager"])
def test_int8_weights(options: dict[str, Any], tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    rounded = rounded_checkpoint(model, tmp_path / "rounded")
    one = make_adapter(rounded.path, tmp_path, 1, targets=EVERYWHERE)
    other = make_adapter(rounded.path, tmp_path, 2, rank=4)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 128}
    with engine(model.path, **lora, **options, additional_config=INT8) as llm:
        warm = CompilationCount.now()
        run(llm, rounded, greedy_requests(1, [5, 70, 1, 40]), [one, None, other, one])
        run(llm, rounded, greedy_requests(2, [5, 70]), [None, None])
        assert CompilationCount.now() == warm
