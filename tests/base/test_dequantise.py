"""Dequantised streams: the weights that a format's own packer says, however the parts of each come."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import compressed_packing as library
import numpy as np
import pytest
import torch
from compressed_packing import library_scheme
from safetensors.torch import save_file

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized import stream
from model_runner_base.models.quantized.formats import registry
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import Dequantiser
from model_runner_base.models.quantized.weight_format import WeightFormat
from model_runner_base.testing.quantized import Scheme, awq, fp8, gptq, microscaled, mxfp4, nvfp4

FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8"}
OUT, IN = 40, 96


def microscaled_config(num_bits: int) -> dict[str, object]:
    weights = {"num_bits": num_bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    form = "mxfp4-pack-quantized" if num_bits == 4 else "mxfp8-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}}


SCHEMES = {
    "fp8": Scheme(FP8_CONFIG, fp8()),
    "fp8 of blocks": Scheme(FP8_CONFIG | {"weight_block_size": [16, 64]}, fp8((16, 64), ".weight_scale_inv")),
    "fp8 of rows": Scheme({"quant_method": "fbgemm_fp8"}, fp8((1, IN))),
    "gptq": Scheme(GPTQ_CONFIG, gptq(4, 16, False)),
    "gptq of 8 bits": Scheme(GPTQ_CONFIG | {"bits": 8, "group_size": -1}, gptq(8, IN, False)),
    "gptq of 2 bits": Scheme(GPTQ_CONFIG | {"bits": 2}, gptq(2, 16, False)),
    "gptq in order": Scheme(GPTQ_CONFIG | {"desc_act": True}, gptq(4, 16, True)),
    "gptq v2": Scheme(GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"}, gptq(4, 16, False, is_v2=True)),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "modelopt fp8": Scheme(MODELOPT_CONFIG, fp8()),
    "modelopt nvfp4": Scheme(MODELOPT_CONFIG | {"quant_algo": "NVFP4"}, nvfp4(".weight", ".weight_scale_2", False)),
    "int8": library_scheme(library.INT8),
    "int8 asymmetric": library_scheme(library.INT8_ASYMMETRIC),
    "int4": library_scheme(library.INT4),
    "int4 asymmetric": library_scheme(library.INT4_ASYMMETRIC),
    "int4 in order": library_scheme(library.INT4_ORDERED),
    "float8": library_scheme(library.FP8),
    "float8 of rows": library_scheme(library.FP8_CHANNEL),
    "float8 of blocks": library_scheme(library.FP8_BLOCK),
    "nvfp4": library_scheme(library.NVFP4),
    "nvfp4 by definition": Scheme(
        library_scheme(library.NVFP4).config, nvfp4(".weight_packed", ".weight_global_scale", True)
    ),
    "mxfp4 by definition": Scheme(microscaled_config(4), microscaled(is_fp4=True)),
    "mxfp8 by definition": Scheme(microscaled_config(8), microscaled(is_fp4=False)),
}
"""Schemes of weights [out, in]; those of compressed-tensors are packed and unpacked by that library, but for three."""

Weights = dict[str, torch.Tensor]
PLAIN = {"model.norm.weight": torch.ones(5), "lm_head.weight": torch.ones(5, 3)}


def stored_and_plain(scheme: Scheme, shape: tuple[int, ...] = (64, IN)) -> tuple[Weights, Weights]:
    """Stored tensors of two layers and of what is not quantised, and the plain weights."""
    rng = np.random.default_rng(7)
    stored, plain = dict(PLAIN), dict(PLAIN)
    for name in ("model.layers.0.up_proj.weight", "model.layers.1.up_proj.weight"):
        packed = scheme.pack(rng.standard_normal(shape).astype(np.float32), rng)
        plain[name] = torch.from_numpy(packed.plain)
        stored |= {name.removesuffix(scheme.own_name) + ending: each for ending, each in packed.tensors.items()}
    return stored, plain


def format_of(scheme: Scheme) -> WeightFormat:
    return registry.format_of(scheme.config)


def dequantised(scheme: Scheme, stored: Weights, place: StoredTensors | None = None) -> Weights:
    names = list(Dequantiser(format_of(scheme), torch.float32, place).weights(stored.items()))
    assert len(dict(names)) == len(names)
    return dict(names)


def assert_equal(got: Weights, want: Weights) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=2e-7, atol=0)


def orders(stored: Weights) -> Iterator[Weights]:
    """The tensors by name, backwards, and all scales after all values."""
    names = sorted(stored)
    values_first = sorted(names, key=lambda name: not name.endswith((".weight", "_packed", ".qweight", "_blocks")))
    for each in (names, names[::-1], values_first):
        yield {name: stored[name] for name in each}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_those_of_the_packer(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    stored, plain = stored_and_plain(scheme)
    unused = {"model.layers.0.up_proj.input_scale": torch.ones(1), "model.layers.0.attn.k_scale": torch.ones(1)}
    for ordered in orders(stored | unused):
        assert_equal(dequantised(scheme, ordered), plain)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    place = StoredTensors(tmp_path)
    assert stream.first_fault(format_of(scheme), place) is None
    assert stream.plain_shapes(format_of(scheme), place) == {name: list(each.shape) for name, each in plain.items()}
    for ordered in orders(stored):
        assert_equal(dequantised(scheme, ordered, place), plain)


MXFP4 = Scheme({"quant_method": "mxfp4"}, mxfp4(), own_name=".weight")


def test_stacked_experts() -> None:
    """Experts of one tensor: gpt-oss in MXFP4, and FP8 in blocks, where each expert has scales of its own."""
    rng = np.random.default_rng(8)
    weight = rng.standard_normal((3, 64, 48)).astype(np.float32)
    packed = mxfp4()(weight, rng)
    stored = {f"experts.gate_up_proj{ending}": tensor for ending, tensor in packed.tensors.items()}
    stored["experts.gate_up_proj_bias"] = torch.ones(3, 48)
    want = {"experts.gate_up_proj": torch.from_numpy(packed.plain), "experts.gate_up_proj_bias": torch.ones(3, 48)}
    assert_equal(dequantised(MXFP4, stored), want)
    each = [fp8((16, 32), "_scale_inv")(one, rng) for one in weight]
    name, block = "experts.gate_up_proj", SCHEMES["fp8 of blocks"]
    scheme = Scheme(block.config | {"weight_block_size": [16, 32]}, block.pack)
    stored = {
        name: torch.stack([one.tensors[".weight"] for one in each]),
        f"{name}_scale_inv": torch.stack([one.tensors["_scale_inv"] for one in each]),
    }
    assert_equal(dequantised(scheme, stored), {name: torch.from_numpy(np.stack([one.plain for one in each]))})


def test_layers_with_settings_of_their_own() -> None:
    """GPTQ's ``dynamic`` and the targets of compressed-tensors give layers other settings than the rest."""
    rng = np.random.default_rng(10)
    weight = rng.standard_normal((64, IN)).astype(np.float32)
    groups = {
        "a": {"targets": ["Linear"], "weights": library.INT4},
        "b": {"targets": ["re:.*down"], "weights": library.INT8_ASYMMETRIC},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    dynamic = {"-:.*gate": {}, "+:.*down": {"bits": 8, "group_size": 32}}
    for own, first, second in (
        (config, library_scheme(library.INT4).pack, library_scheme(library.INT8_ASYMMETRIC).pack),
        (GPTQ_CONFIG | {"dynamic": dynamic}, gptq(4, 16, False), gptq(8, 32, False)),
    ):
        up, down = first(weight, rng), second(weight, rng)
        stored = {f"a.up{ending}": tensor for ending, tensor in up.tensors.items() if ending != ".g_idx"}
        stored |= {f"a.down{ending}": tensor for ending, tensor in down.tensors.items() if ending != ".g_idx"}
        want = {"a.up.weight": torch.from_numpy(up.plain), "a.down.weight": torch.from_numpy(down.plain)}
        assert_equal(dequantised(Scheme(own, first), stored), want)


def test_other_shapes_and_dtypes() -> None:
    """Blocks of 128 with a rest, powers of two as scales, bfloat16 results, and a weight that is stored plain."""
    rng = np.random.default_rng(9)
    weight = rng.standard_normal((200, 320)).astype(np.float32)
    packed = fp8((128, 128), ".weight_scale_inv")(weight, rng)
    scheme = Scheme(FP8_CONFIG | {"weight_block_size": [128, 128]}, fp8())
    stored = {f"a{ending}": tensor for ending, tensor in packed.tensors.items()}
    assert_equal(dequantised(scheme, stored), {"a.weight": torch.from_numpy(packed.plain)})
    rounded = dict(Dequantiser(format_of(scheme), torch.bfloat16).weights(stored.items()))["a.weight"]
    assert rounded.equal(torch.from_numpy(packed.plain).bfloat16())
    values, exponents = packed.tensors[".weight"], torch.tensor([[120, 127, 130], [0, 1, 254]], dtype=torch.uint8)
    powers = torch.from_numpy(np.ldexp(np.float32(1), exponents.numpy().astype(int) - 127))
    got = dequantised(scheme, {"a.weight": values, "a.weight_scale_inv": exponents})["a.weight"]
    assert got[-1, -1] == values[-1, -1].float() * powers[1, 2] and got[0, 0] == values[0, 0].float() * powers[0, 0]
    plain = {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16), "a.weight_scale_inv": torch.ones(1, 1)}
    for order in (plain, dict(reversed(plain.items()))):
        assert list(dequantised(scheme, order)) == ["a.weight"]


@pytest.mark.parametrize(
    "name", ["fp8 of blocks", "gptq in order", "awq", "int4 asymmetric", "nvfp4", "modelopt nvfp4"]
)
def test_a_missing_part_is_named(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    stored, _ = stored_and_plain(scheme)
    for part in [part for part in stored if ".layers.1." in part and part != "model.layers.1.up_proj.weight"]:
        rest = {name: tensor.contiguous() for name, tensor in stored.items() if name != part}
        save_file(rest, tmp_path / "model.safetensors")
        message = f"{re.escape(part)} is missing, and .* needs it for model.layers.1.up_proj"
        assert re.match(message, str(stream.first_fault(format_of(scheme), StoredTensors(tmp_path))))
        with pytest.raises(CheckpointError, match=message):
            dequantised(scheme, rest)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("fp8 of blocks", "weight_scale_inv", lambda scale: scale.T),
        ("gptq", "g_idx", lambda index: index[1:]),
        ("gptq", "qzeros", lambda zeros: zeros[:-1]),
        ("awq", "scales", lambda scales: scales[:-1]),
        ("int4", "weight_scale", lambda scale: scale.T),
        ("int4", "weight_packed", lambda values: values[:, 1:]),
        ("nvfp4", "weight_scale", lambda scale: scale.T),
    ],
)
def test_parts_that_do_not_fit_are_named(name: str, part: str, change: object, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    stored, _ = stored_and_plain(scheme)
    stored[f"model.layers.1.up_proj.{part}"] = change(stored[f"model.layers.1.up_proj.{part}"])  # type: ignore[operator]
    stored = dict(sorted(stored.items()))
    message = "model.layers.1.up_proj.weight cannot be dequantised from "
    with pytest.raises(CheckpointError, match=message):
        dequantised(scheme, stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        stream.plain_shapes(format_of(scheme), StoredTensors(tmp_path))


def test_a_shard_that_is_cut_off_or_missing_is_named(tmp_path: Path) -> None:
    stored, _ = stored_and_plain(SCHEMES["gptq"])
    file = tmp_path / "model.safetensors"
    save_file(stored, file)
    content = file.read_bytes()
    for length, what in ((len(content) - 1, r"in or before \S+"), (50, "in its header"), (3, "in its header")):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"model\.safetensors is cut off {what}: copy"):
            StoredTensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"has no model-1-of-2\.safetensors, which model\.safetensors\.index"):
        StoredTensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quark"}, "quantization quark has no kernels here and is not dequantised: use the"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ checkpoints with bits 3 are not dequantised"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 3}}}, "with bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config sparse-24-bitmask",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    ],
)
def test_what_is_not_dequantised_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message) as raised:
        registry.format_of(config)
    assert "\n" not in str(raised.value)


FAULTS = {
    "a zero point off by one": ("gptq", "formats/packed_integers.py", "zeros = zeros + 1", "zeros = zeros + 0"),
    "act order ignored": (
        "gptq in order",
        "formats/packed_integers.py",
        'groups = fields.get("groups")',
        "groups = None",
    ),
    "the scale of the neighbouring block": (
        "fp8 of blocks",
        "formats/small_floats.py",
        'scale_(values, scale_values(fields["scale"])',
        'scale_(values, scale_values(fields["scale"]).roll(1, 1)',
    ),
    "scales of a weight transposed": (
        "fp8 of square blocks",
        "formats/small_floats.py",
        'scale_(values, scale_values(fields["scale"])',
        'scale_(values, scale_values(fields["scale"]).T',
    ),
    "the other order in a word": (
        "awq",
        "formats/packed_integers.py",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
    ),
    "zero points left out": ("int4 asymmetric", "formats/compressed_tensors.py", "shift_(values, *", "(values, *"),
    "values swapped in a byte": (
        "nvfp4",
        "formats/compressed_tensors.py",
        "unpack_fp4(values)",
        "unpack_fp4(values >> 4 | values << 4)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_deliberate_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, file, old, new = FAULTS[name]
    square = Scheme(FP8_CONFIG | {"weight_block_size": [32, 48]}, fp8((32, 48), ".weight_scale_inv"))
    scheme = (SCHEMES | {"fp8 of square blocks": square})[kind]
    stored, plain = stored_and_plain(scheme)
    assert_equal(dequantised(scheme, stored), plain)
    path = Path(stream.__file__).parent / file
    assert path.read_text().count(old) == 1
    module = ModuleType("faulty")
    exec(compile(path.read_text().replace(old, new), str(path), "exec"), vars(module))
    known = registry.FORMATS[scheme.config["quant_method"]]
    faulty = known._replace(form=getattr(module, known.form.__name__))
    monkeypatch.setitem(registry.FORMATS, scheme.config["quant_method"], faulty)
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(dequantised(scheme, stored), plain)
