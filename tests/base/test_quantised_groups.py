"""Settings of single layers: which group or rule a quantised weight belongs to, and settings that its file denies."""

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import compressed_packing as library
import numpy as np
import pytest
import torch
from compressed_packing import library_pack
from compressed_tensors.utils.match import is_match, match_targets
from safetensors.torch import save_file
from test_dequantise import FP8_CONFIG, GPTQ_CONFIG, MODELOPT_CONFIG, SCHEMES, Weights, assert_equal
from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized import stream
from model_runner_base.models.quantized.formats import registry
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import Dequantiser
from model_runner_base.testing.quantized import Pack, fp8, gptq, integers, nvfp4

LAYERS = {
    "model.embed_tokens": nn.Embedding(64, 96),
    "model.layers.0.self_attn.q_proj": nn.Linear(96, 64),
    "model.layers.0.self_attn.o_proj": nn.Linear(96, 64),
    "model.layers.0.mlp.gate": nn.Linear(96, 64),
    "model.layers.0.mlp.experts.1.up_proj": nn.Linear(96, 64),
    "model.layers.0.mlp.experts.1.down_proj": nn.Linear(96, 64),
    "model.layers.1.mlp.down_proj": nn.Linear(96, 64),
    "model.per_layer_embedding_proj": nn.Linear(96, 64),
    "embed_out": nn.Linear(96, 64),
    "lm_head": nn.Linear(96, 64),
}
"""Layers of a model, and their classes in transformers."""
VLLM_CLASSES = {nn.Embedding: "VocabParallelEmbedding", nn.Linear: "ColumnParallelLinear"}
RECIPES: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "names, and the class": ({"re:.*self_attn.*": library.INT4, "Linear": library.INT4_ASYMMETRIC}, ["lm_head"]),
    "other bits": ({"re:.*mlp.*": library.INT8, "Linear": library.INT4_ORDERED}, ["re:.*lm_head", "re:.*gate$"]),
    "an embedding": ({"Embedding": library.INT4_ASYMMETRIC, "Linear": library.INT4}, []),
    "an embedding alone": ({"Embedding": library.INT4}, []),
    "floats": (
        {"model.layers.1.mlp.down_proj": library.NVFP4, "re:.*experts": library.FP8_CHANNEL, "Linear": library.INT8},
        ["model.layers.0.mlp.gate"],
    ),
    "patterns that overlap": (
        {
            "re:.*proj": library.INT8_ASYMMETRIC,
            "re:.*mlp.*": library.INT4,
            "model.layers.1.mlp.down_proj": library.FP8,
            "Linear": library.INT4_ASYMMETRIC,
        },
        [],
    ),
}
"""Settings by target, and what is ignored."""


def config_of(groups: dict[str, dict[str, Any]], ignore: list[str] | None = None) -> dict[str, Any]:
    own = {f"group_{i}": {"targets": [each], "weights": groups[each]} for i, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": own, "ignore": ignore or []}


def packed_by(pack: Pack, layer: str, seed: int = 0) -> tuple[Weights, Weights]:
    """Stored tensors of a layer, and its weight."""
    rng = np.random.default_rng(seed)
    packed = pack(rng.standard_normal((64, 96)).astype(np.float32), rng)
    stored = {layer + ending: tensor.contiguous() for ending, tensor in packed.tensors.items()}
    return stored, {f"{layer}.weight": torch.from_numpy(packed.plain)}


def read(config: dict[str, Any], stored: Weights) -> Weights:
    return dict(Dequantiser(registry.format_of(config), torch.float32).weights(stored.items()))


@pytest.mark.parametrize("name", RECIPES)
def test_layers_have_the_settings_that_the_library_gave_them(name: str) -> None:
    """The library says by which target it quantises a layer; each order of the config's groups dequantises that."""
    groups, ignore = RECIPES[name]
    stored: Weights = {}
    plain: Weights = {}
    for index, (layer, module) in enumerate(LAYERS.items()):
        targets = [] if is_match(layer, module, ignore) else match_targets(layer, module, groups)
        own = {f"{layer}.weight": torch.full((2, 3), float(index))}
        tensors, weight = packed_by(library_pack(groups[targets[0]]), layer, index) if targets else (own, own)
        stored, plain = stored | tensors, plain | weight
    for order in permutations(groups):
        config = config_of({target: groups[target] for target in order}, ignore)
        assert_equal(read(config, stored), plain)
        assert_equal(read(config, dict(reversed(stored.items()))), plain)


@pytest.mark.parametrize("name", ["names, and the class", "other bits", "an embedding", "floats"])
def test_groups_are_those_that_vllm_finds(name: str) -> None:
    """Groups that a weight is dequantised by are those of vLLM's function, where no patterns overlap."""
    groups, ignore = RECIPES[name]
    form = registry.format_of(config_of(groups, ignore))
    for layer, module in LAYERS.items():
        if type(module) is nn.Embedding and "Embedding" not in groups:
            continue  # vLLM 0.16 raises its error.
        parallel = type(VLLM_CLASSES[type(module)], (), {})()
        assert form._settings(f"{layer}.weight") == groups[find_matched_target(layer, parallel, groups)]  # type: ignore[attr-defined]


def test_a_name_holds_though_transformers_renamed_its_layers() -> None:
    groups = {"model.language_model.layers.0.up_proj": library.INT4_ASYMMETRIC, "Linear": library.INT4}
    for layer in ("language_model.model.layers.0.up_proj", "model.layers.0.up_proj"):
        stored, plain = packed_by(library_pack(library.INT4_ASYMMETRIC), layer)
        assert_equal(read(config_of(groups), stored), plain)


INT4, INT4_ASYMMETRIC, INT8 = (library_pack(each) for each in (library.INT4, library.INT4_ASYMMETRIC, library.INT8))
PACKED_INT8 = library.INT4 | {"num_bits": 8}
GPTQ_DYNAMIC = {"dynamic": {"+:.*up": {"bits": 8}}}
MIXED = MODELOPT_CONFIG | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.up": {"quant_algo": "NVFP4"}}}
CONTRADICTIONS: dict[str, tuple[dict[str, Any], Pack, str]] = {
    "no class": (config_of({"Embedding": library.INT4}), INT4, "no target of config_groups that fits it"),
    "no name": (config_of({"re:.*down": library.INT4}), INT4, "no target of config_groups that fits it"),
    "no groups": ({"quant_method": "compressed-tensors"}, INT4, "no target of config_groups that fits it"),
    "activations alone": (config_of({"Linear": None}), INT4, "no target .* has settings for weights"),  # type: ignore[dict-item]
    "ignored": (config_of({"Linear": library.INT4}, ["re:a.*"]), INT4, "ignore has re:a.*, so it should be stored as"),
    "symmetric": (config_of({"Linear": library.INT4}), INT4_ASYMMETRIC, "says symmetric, and it has a zero point"),
    "8 bits in 4": (config_of({"Linear": PACKED_INT8}), INT4, "weight_packed has .* 8 bits, as its group says, take"),
    "4 bits in 8": (
        config_of({"Linear": library.INT4}),
        integers(8, 16, True),
        r"\[64, 24\] words, and 4 bits, ",
    ),
    "zero points of 8 bits": (
        config_of({"Linear": library.INT4_ASYMMETRIC}),
        lambda weight, rng: (packed := INT4_ASYMMETRIC(weight, rng))._replace(
            tensors=packed.tensors
            | {".weight_zero_point": integers(8, 16, False)(weight, rng).tensors[".weight_zero_point"]}
        ),
        r"weight_zero_point has \[16\] words, and 4 bits, as its group says, take \[8\]",
    ),
    "integers as floats": (config_of({"Linear": library.FP8}), INT8, "float of 8 bits, .* are stored in int8"),
    "floats as integers": (config_of({"Linear": library.INT8}), fp8(), "int of 8 bits, .* are stored in float8_e4m3fn"),
    "FP8 as FP4": (config_of({"Linear": library.NVFP4}), library_pack(library.FP8), "float of 4 bits, .* in float8"),
    "FP4 as FP8": (config_of({"Linear": library.FP8}), library_pack(library.NVFP4), "float of 8 bits, .* in uint8"),
    "an order": (
        config_of({"Linear": library.INT4_ASYMMETRIC}),
        library_pack(library.INT4_ORDERED),
        "actorder None",
    ),
    "groups of 32": (config_of({"Linear": library.INT4 | {"group_size": 32}}), INT4, "scales of shape .* do not fit"),
    "channels": (config_of({"Linear": library.INT4 | {"group_size": None}}), INT4, "scales of shape .* do not fit"),
    "GPTQ, left out": (GPTQ_CONFIG | {"dynamic": {"-:.*up": {}}}, gptq(4, 16, False), "dynamic has -:.*up, so it shou"),
    "GPTQ, 8 bits in 4": (GPTQ_CONFIG | GPTQ_DYNAMIC, gptq(4, 16, False), "q(zeros|weight) has .* 8 bits, which take"),
    "GPTQ, 4 bits in 8": (GPTQ_CONFIG, gptq(8, 16, False), "q(zeros|weight) has .* its config says 4 bits, which take"),
    "ModelOpt, FP8 as NVFP4": (MIXED, fp8(), "quantized_layers says NVFP4, and its values are stored in float8_e4m3fn"),
    "ModelOpt, two scales": (
        MODELOPT_CONFIG,
        lambda weight, rng: (packed := fp8()(weight, rng))._replace(
            tensors=packed.tensors | {".weight_scale_2": torch.ones(1)}
        ),
        "weight_scale_2 belongs to NVFP4, and it has FP8",
    ),
    "AWQ, groups of 16": (
        SCHEMES["awq"].config | {"group_size": 16},
        SCHEMES["awq"].pack,
        r"scales of shape .* do not fit \[96, 64\] in blocks of \[16, 1\]",
    ),
    "FP8, other blocks": (
        SCHEMES["fp8 of blocks"].config | {"weight_block_size": [32, 32]},
        SCHEMES["fp8 of blocks"].pack,
        "scales of shape .* do not fit",
    ),
}
"""Configs, what a layer is packed by, and what is wrong with it."""
SEEN_IN_NUMBERS = ("groups of 32", "channels", "AWQ, groups of 16", "FP8, other blocks")


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_file_that_denies_its_config_is_refused(name: str, tmp_path: Path) -> None:
    """Raises the same error in each order of the parts, and before a weight is read, but for scales that do not fit."""
    config, pack, reason = CONTRADICTIONS[name]
    stored, _ = packed_by(pack, "a.up")
    message = rf"^a\.up\.weight cannot be dequantised from \S+: .*{reason}"
    for each in (stored, dict(reversed(stored.items())), dict(sorted(stored.items()))):
        with pytest.raises(CheckpointError, match=message):
            read(config, each)
    save_file(stored, tmp_path / "model.safetensors")
    form, place = registry.format_of(config), StoredTensors(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        stream.plain_shapes(form, place)
    if name not in SEEN_IN_NUMBERS:
        assert re.search(message, str(stream.first_fault(form, place)))


def test_gptq_of_8_bits_without_their_order_is_refused() -> None:
    """Zero points alone say how many bits there are if ``g_idx`` is left out."""
    stored, _ = packed_by(gptq(4, 96, False), "a.up")
    del stored["a.up.g_idx"]
    with pytest.raises(CheckpointError, match=r"qzeros has 8 words .* 8 bits, which take 16"):
        read(GPTQ_CONFIG | GPTQ_DYNAMIC | {"group_size": -1}, stored)


def test_an_order_that_comes_too_late_is_refused() -> None:
    """Parts that no setting asks for, after the weight was handed on: a trivial order changes nothing, another does."""
    for has_order in (False, True):
        stored, plain = packed_by(gptq(4, 16, has_order), "a.up")
        assert_equal(read(GPTQ_CONFIG, {"a.up.g_idx": stored["a.up.g_idx"]} | stored), plain)
        late = {name: stored[name] for name in sorted(stored, key=lambda name: name.endswith("g_idx"))}
        if has_order:
            with pytest.raises(CheckpointError, match=r"a\.up\.weight .* g_idx, which came last, has an order"):
                read(GPTQ_CONFIG, late)
        else:
            assert_equal(read(GPTQ_CONFIG, late), plain)


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (SCHEMES["awq"].config | {"modules_to_not_convert": ["up"]}, SCHEMES["awq"].pack),
        (GPTQ_CONFIG | {"modules_in_block_to_quantize": [["down"]]}, gptq(4, 16, False)),
        (FP8_CONFIG | {"ignored_layers": ["a.up"], "modules_to_not_convert": ["a.up"]}, fp8()),
        (MODELOPT_CONFIG | {"exclude_modules": ["a.up*"], "ignore": ["a.up*"]}, fp8()),
        (MIXED, nvfp4(".weight", ".weight_scale_2", False)),
        (MIXED | {"quantized_layers": {"a.up": {"quant_algo": "FP8"}}}, fp8()),
    ],
)
def test_a_layer_is_what_it_is_stored_as(config: dict[str, Any], pack: Pack) -> None:
    """Lists of layers in configs without settings of their own decide nothing: the file says what a layer is."""
    stored, plain = packed_by(pack, "a.up")
    as_it_is = {"a.gate.weight": torch.ones(2, 3)}
    assert_equal(read(config, stored | as_it_is), plain | as_it_is)


@pytest.mark.parametrize("name", ["fp8", "gptq", "awq", "modelopt fp8", "int4", "mxfp8 by definition"])
def test_bytes_are_no_plain_weights(name: str, tmp_path: Path) -> None:
    form, stored = registry.format_of(SCHEMES[name].config), {"a.gate_proj": torch.ones(4, 4, dtype=torch.int8)}
    message = "a.gate_proj is stored in int8, and .* has no such weights"
    with pytest.raises(CheckpointError, match=message):
        list(Dequantiser(form, torch.float32).weights(stored.items()))
    save_file(stored, tmp_path / "model.safetensors")
    assert re.match(message, str(stream.first_fault(form, StoredTensors(tmp_path))))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo W4A8_AWQ"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "quantized_layers": {"a": {}}}},
            "quant_algo None",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": library.INT4},
                    "b": {"targets": ["re:.*up", "Linear"], "weights": library.INT8},
                },
            },
            "two groups for target Linear",
        ),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        registry.format_of(config)
