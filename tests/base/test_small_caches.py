"""KV caches of 8 bits a number: the engine computes what HF transformers computes of rounded keys and values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from safetensors.torch import load_file
from test_latent_attention import LARGEST, caches_of
from test_reload import reload_weights
from vllm.config import CacheConfig

from model_runner_base.attention.cache_format import FLOAT8, Float8
from model_runner_base.models.loader import CheckpointError
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, metric
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import Scheme, fp8, write_checkpoints
from model_runner_base.testing.rounding import FORMATS, SCALES, changed, check_rounded, enlarge_values, rounded

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(120, [2, 17, 33, 64, 90, 150])
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "enforce_eager": True, "max_logprobs": -1}


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_the_nearest_of_the_format(name: str) -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate(
        (rng.normal(size=4000) * np.exp2(rng.integers(-20, 18, 4000)), [0.0, 1e4, -1e30, 448, 464, 1e-9])
    )
    numbers = Float8(FLOAT8[name], torch.float32)
    for dtype in (torch.uint8, numbers.kind):
        stored = numbers.store(torch.tensor(x, dtype=torch.float32), dtype)
        assert stored.dtype == dtype
        got = numbers.restore(stored).numpy()
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, rounded(x.astype(np.float32), name))


@pytest.mark.parametrize(
    ("model_name", "name"),
    [
        ("llama", "fp8"),
        pytest.param("mistral-window", "fp8_e5m2", marks=pytest.mark.once),
        ("deepseek-v2", "fp8_e4m3"),
    ],
)
def test_equals_transformers_with_rounding(model_name: str, name: str, tiny_model: Tiny) -> None:
    """Chunks, mixed batches, then prefixes that are found in the cache, which has one byte a number."""
    model = tiny_model(model_name)
    with engine(model.path, **OPTIONS, kv_cache_dtype=name) as llm:
        config = core_of(llm).scheduler.kv_cache_config
        assert all(cache.itemsize == 1 for cache in caches_of(llm))
        per_token = 2 * (32 if model_name == "deepseek-v2" else 2 * 2 * 16)
        assert config.num_blocks == (1 << 20) // (32 * per_token)
        for _ in range(2):
            check_rounded(llm, model, PROMPTS, name)
        assert metric(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.openxla
@pytest.mark.parametrize(("model_name", "name"), [("llama", "fp8"), ("deepseek-v2", "fp8_e5m2")])
def test_compiled(model_name: str, name: str, tiny_model: Tiny) -> None:
    model = tiny_model(model_name)
    options = OPTIONS | {"enforce_eager": False, "kv_cache_dtype": name}
    with engine(model.path, **options, additional_config=LARGEST) as llm:
        before = compilations()
        check_rounded(llm, model, PROMPTS, name)
        assert compilations() == before


@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.openxla)])
def test_scales_of_the_checkpoint(is_eager: bool, tiny_model: Tiny, tmp_path: Path) -> None:
    """Keys and values are divided by the checkpoint's scales; a reload brings others, and nothing is compiled."""
    model = changed(tiny_model("llama"), tmp_path / "scaled", enlarge_values)
    new = changed(tiny_model("llama"), tmp_path / "other", lambda weights: enlarge_values(weights, 1.7))
    options = OPTIONS | {"enforce_eager": is_eager, "kv_cache_dtype": "fp8"}
    with engine(model.path, **options, additional_config=LARGEST) as llm:
        before = compilations()
        check_rounded(llm, model, PROMPTS, "fp8", SCALES)
        reload_weights(llm, weights_path=str(new.path))
        others = {layer: (1.7 * key, 1.7 * value) for layer, (key, value) in SCALES.items()}
        check_rounded(llm, new, PROMPTS, "fp8", others)
        assert compilations() == before


def test_a_scale_of_latents(tiny_model: Tiny, tmp_path: Path) -> None:
    """Latents and rotary keys of a layer have one scale, that of keys."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.k_scale"] = torch.tensor(0.013)
        weights["model.layers.0.self_attn.v_scale"] = torch.tensor(7.0)

    model = changed(tiny_model("deepseek-v2"), tmp_path / "scaled", change)
    with engine(model.path, **OPTIONS, kv_cache_dtype="fp8") as llm:
        check_rounded(llm, model, PROMPTS, "fp8", {0: (0.013, 0.013)})


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.openxla)])
def test_a_quantised_checkpoint(is_eager: bool, tiny_model: Tiny, tmp_path: Path) -> None:
    """DeepSeek V3's form: weights in FP8 with a scale for 128 rows and columns, and an 8-bit cache of latents.

    The absorbed projection is made of dequantised weights, and a scale of the cache is not taken for one of weights.
    """
    scheme = Scheme(BLOCKS, fp8((128, 128), ".weight_scale_inv"))
    stored, plain = write_checkpoints(tiny_model("deepseek-v2"), scheme, tmp_path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        assert weights["model.layers.0.self_attn.kv_b_proj.weight"].dtype == torch.float8_e4m3fn
        weights["model.layers.1.self_attn.k_scale"] = torch.tensor(0.02)

    model = changed(stored, tmp_path / "scaled", change)
    options = OPTIONS | {"enforce_eager": is_eager, "kv_cache_dtype": "fp8"}
    with engine(model.path, **options, additional_config=LARGEST) as llm:
        assert all(cache.itemsize == 1 for cache in caches_of(llm))
        check_rounded(llm, plain, PROMPTS, "fp8", {1: (0.02, 0.02)})
        with pytest.raises(AssertionError, match="of the tokens"):
            check_rounded(llm, tiny_model("deepseek-v2"), PROMPTS, "fp8", {1: (0.02, 0.02)})


def test_large_values_stay_finite(tiny_model: Tiny, tmp_path: Path) -> None:
    """Values of 1e4 and more become the largest number of the format, and no NaN."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.v_proj.weight"] *= 1e4

    model = changed(tiny_model("llama"), tmp_path / "large", change)
    with engine(model.path, **OPTIONS, kv_cache_dtype="fp8") as llm:
        check_rounded(llm, model, PROMPTS, "fp8")
        # Loaded without scales, a graph has no place for them.
        pairs = [*load_file(model.path / "model.safetensors").items()]
        pairs.append(("model.layers.0.self_attn.k_scale", torch.tensor(0.5)))
        with pytest.raises(CheckpointError, match="loaded without scales of its KV cache"):
            reload_weights(llm, weights_iterator=pairs)


@pytest.mark.parametrize(
    ("tensor", "options", "words"),
    [
        (None, {"calculate_kv_scales": True}, "leave out calculate_kv_scales"),
        (torch.tensor(-1.0), {}, "k_scale is no scale of a KV cache"),
        (torch.ones(2), {}, "k_scale is no scale of a KV cache"),
    ],
)
def test_what_is_not_served_is_refused(
    tensor: torch.Tensor | None, options: dict[str, Any], words: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        if tensor is not None:
            weights["model.layers.0.self_attn.k_scale"] = tensor

    model = changed(tiny_model("llama"), tmp_path / "bad", change)
    if options.keys() - CacheConfig.__dataclass_fields__.keys():
        pytest.skip("this release of vLLM has no such setting")
    with pytest.raises(Exception, match=words), engine(model.path, **OPTIONS | options, kv_cache_dtype="fp8"):
        pass
