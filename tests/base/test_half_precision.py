"""Models in bfloat16 and float16, against HF transformers in the same dtype; and which dtype a model runs in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import engine
from lane import HAS_OPENXLA
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.half_precision import DTYPES, EAGER, ORDERS, Half
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import EXAMPLES, write_checkpoints
from model_runner_base.testing.rounding import changed
from model_runner_base.vllm_compat.patches import configs as auto_dtype
from model_runner_base.vllm_compat.probes.experts import wrong_in_float16

PROMPTS = random_prompts(33, [5, 30, 70, 120, 200])
OPTIONS = {"max_model_len": 256, "max_logprobs": -1, "enforce_eager": True}
HERE = [dtype for dtype in DTYPES if getattr(torch, dtype) in current_platform.dtypes]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
Make = Callable[[str], TinyModel]


@pytest.mark.newest
@pytest.mark.parametrize("dtype", DTYPES)
def test_orders(dtype: str, tiny_model: Make) -> None:
    """Values are as near to those of transformers as these are to each other in two orders of summation."""
    model = tiny_model("llama")
    with engine(model.path, dtype=dtype, **OPTIONS) as llm:
        half = Half.run(llm, model, PROMPTS, dtype)
    half.check_orders()
    half.check()


@pytest.mark.parametrize("dtype", HERE)
def test_drafts(dtype: str, tiny_model: Make) -> None:
    """Drafts of which some are right leave values as near to float32."""
    model = tiny_model("llama")
    with engine(model.path, dtype=dtype, speculative_config=DRAFTS, **OPTIONS) as llm:
        half = Half.run(llm, model, PROMPTS, dtype)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
    half.check()


def with_all_experts(model: TinyModel) -> TinyModel:
    """The model with all experts for each token: rounding may turn a choice of some, which is no small difference."""
    model = changed(model, model.path.with_name(f"{model.path.name}-all"), lambda weights: None)
    for file in model.path.rglob("config.json"):
        config = json.loads(file.read_text())
        counts = [config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
        if count := next(filter(None, counts), None):
            config |= {"num_experts_per_tok": count} | (
                {"topk_group": config["n_group"]} if "n_group" in config else {}
            )
            file.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v2", "granite-hybrid", "qwen3-next", "lfm2", "mamba"])
def test_families(name: str, dtype: str, tiny_model: Make) -> None:
    """Experts, latents, and recurrent layers of each kind."""
    model = with_all_experts(tiny_model(name))
    with engine(model.path, dtype=dtype, **OPTIONS) as llm:
        Half.run(llm, model, PROMPTS, dtype).check([EAGER] if name == "mamba" else ORDERS)


def saying(model: TinyModel, dtype: str, path: Path) -> Path:
    """A checkpoint without weights whose config says ``dtype``."""
    config = json.loads((model.path / "config.json").read_text())
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"dtype": dtype, "torch_dtype": dtype}))
    return path


def config_of(path: Path, **options: object) -> ModelConfig:
    return EngineArgs(str(path), skip_tokenizer_init=True, **options).create_engine_config().model_config  # type: ignore


def test_auto(tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model runs as its checkpoint says, but on a device that emulates the dtype, which says so in one line."""
    lines: list[str] = []
    monkeypatch.setattr(auto_dtype.logger, "info_once", lambda text, *values: lines.append(text % values))
    for said in ("float32", *DTYPES):
        path = saying(tiny_model("llama"), said, tmp_path / said)
        taken = "float32" if HAS_OPENXLA else said
        assert config_of(path).dtype == getattr(torch, taken), said
        assert config_of(path, runner="pooling", convert="embed").dtype == getattr(torch, taken), said
        assert config_of(path, dtype="bfloat16").dtype == torch.bfloat16
    expected = (
        "The checkpoint says bfloat16, which pjrt-cpu emulates, many times slower than float32: the model runs in "
        "float32. To run it in bfloat16, give --dtype bfloat16"
    )
    assert lines == [expected] * 2 * HAS_OPENXLA


def test_a_gptq_checkpoint_of_float16(tiny_model: Make, tmp_path: Path) -> None:
    """Weights are dequantised to float16 where the device takes it."""
    kind, scheme = EXAMPLES["GPTQ in act order"]
    quantised, plain = write_checkpoints(tiny_model(kind), scheme, tmp_path)
    file = quantised.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16", "torch_dtype": "float16"}))
    if HAS_OPENXLA:
        assert config_of(quantised.path).dtype == torch.float32
        return
    with engine(quantised.path, dtype="auto", **OPTIONS) as llm:
        assert llm.llm_engine.model_config.dtype == torch.float16
        Half.run(llm, plain, PROMPTS, "float16").check()


@pytest.mark.newest
def test_experts_that_vllm_weighs_wrong(tiny_model: Make) -> None:
    model = tiny_model("nemotron-h-moe")
    message = r"mixer\S*: vLLM adds shared experts with a wrong weight in float16"
    with pytest.raises(UnsupportedConfigError, match=message), engine(model.path, dtype="float16", **OPTIONS):
        pass


class NemotronHMoE(torch.nn.Module):
    """Experts of the class that is the only such one in vLLM 0.16."""

    routed_scaling_factor, shared_experts = 2.5, "some"


class OpenPanguDecoderLayer(torch.nn.Module):
    """Layer that divides what it adds."""


@pytest.mark.openxla
def test_such_experts_are_known_by_their_class() -> None:
    experts = NemotronHMoE()
    assert wrong_in_float16(torch.nn.Sequential(experts)) == "0"
    assert wrong_in_float16(torch.nn.Sequential(experts, OpenPanguDecoderLayer())) is None
    experts.shared_experts = None
    assert wrong_in_float16(torch.nn.Sequential(experts)) is None
