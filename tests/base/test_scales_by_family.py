"""Scales of 8-bit KV caches reach the layers that they are of, whatever a family's file and vLLM call these."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine, unchanged_classes
from lane import HAS_OPENXLA
from safetensors.torch import load_file
from test_reload import reload_weights
from test_small_caches import OPTIONS, PROMPTS
from torch import nn
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.model_executor.layers.attention import MLAAttention

from model_runner_base.models.layers.attention_blocks import attention_layers
from model_runner_base.models.layers.cache_scales import scales_by_layer
from model_runner_base.models.loader import CheckpointError, load_checkpoint
from model_runner_base.testing.architectures import CONFIGS, LATENT, LATENT_LATER, LATER, UNEQUAL_HEADS
from model_runner_base.testing.cache_scales import FORMS, attention_paths, enlarge_keys_and_values, write_scales
from model_runner_base.testing.images import FAMILIES, make_seeing_model
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.registry import OVERRIDES
from model_runner_base.testing.rounding import TEXT_ALONE, Scales, changed, check_rounded
from model_runner_base.testing.sounds import HEARING_FAMILIES, make_hearing_model
from model_runner_base.testing.swept_architectures import SWEPT
from model_runner_base.testing.table import refusal
from model_runner_base.testing.transcription import make_transcriber

Make = Callable[[Path], Path]


def makers() -> dict[str, Make]:
    """Makers of a tiny checkpoint of every family that this release of transformers has."""
    made: dict[str, Make] = {}
    # One lane is enough for the families of both.
    for name, config in (
        (CONFIGS if HAS_OPENXLA else {}) | LATER | LATENT | LATENT_LATER | UNEQUAL_HEADS | SWEPT | RECURRENT
    ).items():
        try:
            config()
        except AttributeError:
            continue
        made[name] = lambda path, name=name: make_checkpoint(name, path).path
    made |= {f"{name}, images": lambda path, name=name: make_seeing_model(name, path).path for name in FAMILIES}
    made |= {
        f"{name}, sounds": lambda path, name=name: make_hearing_model(name, path).path for name in HEARING_FAMILIES
    }
    return made


MAKERS = makers()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("scales")
    cleanup_dist_env_and_memory()


def loaded(path: Path, **options: Any) -> nn.Module:
    """The model of a checkpoint with an 8-bit cache, without an engine."""
    limits = {"max_model_len": 128, "kv_cache_dtype": "fp8", "dtype": "float32", "enforce_eager": True}
    config = EngineArgs(str(path), skip_tokenizer_init=True, **limits, **options).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{path}/store", 0, "gloo")
        destroy_model_parallel()  # A model with experts has one group more.
        ensure_model_parallel_initialized(1, 1)
        with unchanged_classes():
            return load_checkpoint(config)


def written(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint whose tensors ``change`` alters."""
    return changed(TinyModel(source), source.with_name(f"{source.name}-scaled"), change).path


@pytest.mark.parametrize("name", MAKERS)
def test_every_family(name: str, directory: Path) -> None:
    """Layers have the scales of their block in the file; a layer that reads another one's cache has that one's."""
    source = MAKERS[name](directory)
    count = len(attention_paths(load_file(source / "model.safetensors")))
    pairs = [(0.1 + index, 0.2 + index) for index in range(count)]
    path = written(source, lambda weights: write_scales(weights, pairs, first=len(name)))
    limits = {"limit_mm_per_prompt": {"video": 0}} if "images" in name else {}
    limits |= {"hf_overrides": OVERRIDES[name]} if name in OVERRIDES else {}
    try:
        model = loaded(path, **limits)
    except ValueError as error:
        assert "not supported" in (refusal(error) or ""), error
        return
    layers = {layer.layer_name: layer for _, layer in attention_layers(model)}
    owners = {name: getattr(layer, "kv_sharing_target_layer_name", None) or name for name, layer in layers.items()}
    own = [layer for layer, owner in owners.items() if layer == owner]
    # Zamba 2 has one block for several layers.
    wanted = dict(zip(own, pairs * len(own) if count == 1 else pairs[: len(own)], strict=True))
    assert scales_by_layer(model).keys() == layers.keys()
    for layer, got in scales_by_layer(model).items():
        key, value = wanted[owners[layer]]
        assert got == pytest.approx((key, key if isinstance(layers[layer], MLAAttention) else value))


@pytest.mark.newest
def test_a_block_of_several_layers(directory: Path) -> None:
    """A layer of a shared block has the scale that the file has under the layer's own number, or else the block's."""
    source = make_checkpoint("zamba2", directory).path
    (first,) = attention_paths(load_file(source / "model.safetensors"))
    places = [index for index, kind in enumerate(RECURRENT["zamba2"]().layers_block_type) if kind == "hybrid"]
    assert len(places) > 1 and f".{places[0]}." in first

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{first}.kv_scale"] = torch.tensor(0.5)
        weights[f"{first.replace(f'.{places[0]}.', f'.{places[-1]}.')}.v_scale"] = torch.tensor(0.25)

    scales = list(scales_by_layer(loaded(changed(TinyModel(source), directory / "zamba2-each", change).path)).values())
    assert scales == [(0.5, 0.5)] * (len(places) - 1) + [(0.5, 0.25)]


def test_an_encoder_and_a_decoder(directory: Path) -> None:
    """The encoder has no cache, so its scales are left out; its outputs are written as they are."""
    source = make_transcriber(directory).path

    def change(weights: dict[str, torch.Tensor]) -> None:
        for place, block in enumerate(("encoder.layers.0.self_attn", "decoder.layers.1.self_attn")):
            weights[f"model.{block}.kv_scale"] = torch.tensor(0.5 / (1 + place))
        weights["model.decoder.layers.1.encoder_attn.kv_scale"] = torch.tensor(0.125)

    found = scales_by_layer(loaded(changed(TinyModel(source), directory / "whisper-scaled", change).path))
    (name,) = [name for name, pair in found.items() if pair != (1.0, 1.0)]
    assert "decoder.layers.1." in name and "self_attn" in name and found[name] == (0.25, 0.25)


def test_scales_of_a_drafter_in_the_file(directory: Path) -> None:
    """A layer that the model leaves out takes its scales with it."""
    source = make_checkpoint("qwen3-next", directory).path

    def change(weights: dict[str, torch.Tensor]) -> None:
        (path,) = attention_paths(weights)
        weights[f"{path}.kv_scale"] = torch.tensor(0.5)
        weights["mtp.layers.0.self_attn.k_proj.weight"] = weights[f"{path}.k_proj.weight"].clone()
        weights["mtp.layers.0.self_attn.kv_scale"] = torch.tensor(0.25)

    found = scales_by_layer(loaded(changed(TinyModel(source), directory / "drafter", change).path))
    assert list(found.values()) == [(0.5, 0.5)]


@pytest.mark.parametrize("name", ["model.layers.7.self_attn.k_scale", "model.layers.0.mlp.v_scale"])
def test_a_scale_of_no_layer_is_named(name: str, directory: Path, tmp_path: Path) -> None:
    """One is enough for a refusal, next to others that fit."""
    source = TinyModel(make_checkpoint("llama", directory).path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        write_scales(weights, [(0.5, 0.5), (0.5, 0.5)])
        weights[name] = torch.tensor(0.5)

    with pytest.raises(CheckpointError, match=f": {name} is a scale of a KV cache, and of no attention layer"):
        loaded(changed(source, tmp_path / "scaled", change).path)


def test_a_zero_point_is_refused(directory: Path, tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.k_zero_point"] = torch.zeros(1)
        weights["model.layers.1.self_attn.k_zero_point"] = torch.ones(1)

    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_zero_point: zero points .* not applied"):
        loaded(changed(TinyModel(make_checkpoint("llama", directory).path), tmp_path / "scaled", change).path)


def test_reload(directory: Path, tmp_path: Path) -> None:
    """Other scales come by a checkpoint, and by an iterator without the weights next to them."""
    plain = TinyModel(make_seeing_model("qwen3-vl", directory).path)
    scales: Scales = {}
    model = changed(plain, tmp_path / "first", lambda weights: scales.update(enlarge_keys_and_values(weights)))
    paths = attention_paths(load_file(model.path / "model.safetensors"))
    with engine(model.path, **OPTIONS, kv_cache_dtype="fp8", **TEXT_ALONE) as llm:
        check_rounded(llm, model, PROMPTS, "fp8", scales)
        scales[1] = 0.7, 500.0
        pairs = [(f"{paths[1]}.{name}", torch.tensor(scale)) for name, scale in zip(FORMS[4], scales[1], strict=True)]
        reload_weights(llm, weights_iterator=pairs)
        check_rounded(llm, model, PROMPTS, "fp8", scales)
        other: Scales = {}
        new = changed(plain, tmp_path / "other", lambda weights: other.update(enlarge_keys_and_values(weights, 1.7)))
        reload_weights(llm, weights_path=str(new.path))
        check_rounded(llm, new, PROMPTS, "fp8", other)
