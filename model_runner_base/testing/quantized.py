"""Quantised checkpoints, packed in NumPy by the formats' definitions, each with the plain one that it stands for."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.models import TinyModel

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that lies in each place of a word, lowest bits first."""


class Packed(NamedTuple):
    """Stored tensors by the endings of their names, and the weight that they stand for."""

    tensors: dict[str, torch.Tensor]
    plain: np.ndarray


Pack = Callable[[np.ndarray, np.random.Generator], Packed]
"""Function that packs a weight [out, in], or stacked experts, float32."""


@dataclass(frozen=True)
class Scheme:
    """A ``quantization_config``, and how a weight is packed by it."""

    config: dict[str, Any]
    pack: Pack
    is_packed: Callable[[str], bool] = lambda name: (
        ".layers." in name and name.endswith("proj.weight") and "router" not in name
    )
    """Whether a tensor of the plain checkpoint is packed, by its name."""
    own_name: str = ".weight"
    """Ending of a plain name that the endings of the stored ones replace."""
    packs: Mapping[str, Pack] = field(default_factory=dict)
    """How weights are packed whose names have a text in them, otherwise than by ``pack``."""

    def pack_of(self, name: str) -> Pack:
        return next((pack for text, pack in self.packs.items() if text in name), self.pack)


def is_stack(name: str) -> bool:
    """Whether a tensor holds stacked experts, by its name."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def words(integers: np.ndarray, num_bits: int) -> torch.Tensor:
    """Words [..., n / p] int32 of integers [..., n] without sign, p in each, lowest bits first."""
    per_word = 32 // num_bits
    parts = integers.astype(np.uint32).reshape(*integers.shape[:-1], -1, per_word)
    packed = np.zeros(parts.shape[:-1], dtype=np.uint32)
    for place in range(per_word):
        packed |= parts[..., place] << np.uint32(place * num_bits)
    return torch.from_numpy(packed.view(np.int32).copy())


def float8(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)


def round_fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 and values of the nearest E2M1 numbers."""
    codes = np.abs(np.abs(values)[..., None] - FP4).argmin(-1)
    return (codes + 8 * (values < 0)).astype(np.uint8), np.where(values < 0, -FP4[codes], FP4[codes])


def bytes_of(codes: np.ndarray) -> torch.Tensor:
    """Bytes [..., n / 2] of codes [..., n], the first in the low bits."""
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)


def fp8(block: tuple[int, int] | None = None, ending: str = ".weight_scale") -> Pack:
    """FP8 with a scale for each block of rows and columns, or for the whole weight."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        rows, columns = block or weight.shape
        scales = np.zeros((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), dtype=np.float32)
        whole = np.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = np.abs(weight[place]).max() / 448
                whole[place] = scales[i, j]
        values = float8(weight / whole)
        stored = scales if block else scales.reshape(())
        tensors = {".weight": values, ending: torch.from_numpy(stored.copy())}
        return Packed(tensors, values.float().numpy() * whole)

    return pack


def gptq(num_bits: int, group: int, has_order: bool, is_v2: bool = False) -> Pack:
    """GPTQ with zero points from 1 on. With an order, inputs of a group do not lie together."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        num_inputs, top = weight.shape[1], 2**num_bits - 1
        index = np.arange(num_inputs) // group
        if has_order:
            rng.shuffle(index)
        scales, zeros = [], []
        for number in range(num_inputs // group):
            own = weight[:, index == number]
            scale = ((own.max(1) - own.min(1)) / (top - 1)).astype(np.float16).astype(np.float32)
            scales.append(scale)
            zeros.append(np.clip(np.rint(-own.min(1) / scale), 1, top))
        scales_of, zeros_of = np.stack(scales), np.stack(zeros)
        values = np.clip(np.rint(weight / scales_of[index].T) + zeros_of[index].T, 0, top)
        tensors = {
            ".qweight": words(values, num_bits).T.contiguous(),
            ".qzeros": words(zeros_of - (not is_v2), num_bits),
            ".scales": torch.from_numpy(scales_of).half(),
            ".g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return Packed(tensors, (values - zeros_of[index].T) * scales_of[index].T)

    return pack


def integers(num_bits: int, group: int, is_symmetric: bool) -> Pack:
    """Integers as compressed-tensors packs them: weights along the inputs, zero points along the outputs."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        groups, half = weight.reshape(len(weight), -1, group), 2 ** (num_bits - 1)
        low, high = groups.min(-1), groups.max(-1)
        if is_symmetric:
            scales, zeros = np.maximum(-low, high) / (half - 1), np.zeros_like(low)
        else:
            scales = (high - low) / (2 * half - 1)
            zeros = np.clip(np.rint(-half - low / scales), -half, half - 1)
        values = np.clip(np.rint(groups / scales[..., None] + zeros[..., None]), -half, half - 1)
        tensors = {
            ".weight_packed": words(values.reshape(weight.shape) + half, num_bits),
            ".weight_shape": torch.tensor(weight.shape),
            ".weight_scale": torch.from_numpy(scales),
        }
        if not is_symmetric:
            tensors[".weight_zero_point"] = words(zeros.T + half, num_bits).T.contiguous()
        return Packed(tensors, ((values - zeros[..., None]) * scales[..., None]).reshape(weight.shape))

    return pack


def awq(group: int) -> Pack:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        grouped = weight.T.reshape(-1, group, weight.shape[0])
        scales = ((grouped.max(1) - grouped.min(1)) / 15).astype(np.float16).astype(np.float32)
        zeros = np.clip(np.rint(-grouped.min(1) / scales), 0, 15)
        values = np.clip(np.rint(grouped / scales[:, None]) + zeros[:, None], 0, 15)
        plain = ((values - zeros[:, None]) * scales[:, None]).reshape(weight.T.shape).T

        def in_words(integers: np.ndarray) -> torch.Tensor:
            return words(integers.reshape(len(integers), -1, 8)[..., AWQ_ORDER].reshape(len(integers), -1), 4)

        tensors = {
            ".qweight": in_words(values.reshape(weight.T.shape)),
            ".qzeros": in_words(zeros),
            ".scales": torch.from_numpy(scales).half(),
        }
        return Packed(tensors, np.ascontiguousarray(plain))

    return pack


def mxfp4() -> Pack:
    """MXFP4 as gpt-oss has it: experts [experts, in, out] are stored as [experts, out, in / 32, 16] bytes."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        blocks = np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(len(weight), weight.shape[2], -1, 32)
        exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6)).astype(np.int32)
        codes, values = round_fp4(np.ldexp(blocks, -exponents[..., None]))
        plain = np.ldexp(values, exponents[..., None]).reshape(len(weight), weight.shape[2], -1).swapaxes(1, 2)
        scales = torch.from_numpy((exponents + 127).astype(np.uint8))
        return Packed({"_blocks": bytes_of(codes), "_scales": scales}, np.ascontiguousarray(plain))

    return pack


def nvfp4(values_name: str, scale_name: str, is_divided: bool) -> Pack:
    """NVFP4: the scale of float8 scales is divided by, as in compressed-tensors, or multiplied with."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        top = np.float32(448 * 6 / np.abs(weight).max())
        groups = weight.reshape(len(weight), -1, 16)
        scales = float8(np.abs(groups).max(-1) / 6 * top)
        factor = top if is_divided else np.float32(1) / top
        whole = scales.float().numpy() / factor if is_divided else scales.float().numpy() * factor
        codes, values = round_fp4(groups / whole[..., None])
        tensors = {
            values_name: bytes_of(codes.reshape(weight.shape)),
            ".weight_scale": scales,
            scale_name: torch.tensor([factor]),
        }
        return Packed(tensors, (values * whole[..., None]).reshape(weight.shape).astype(np.float32))

    return pack


def microscaled(is_fp4: bool) -> Pack:
    """MXFP8 or MXFP4 as compressed-tensors has them: 32 values of a row share a power of two."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.ceil(np.log2(np.abs(groups).max(-1) / (6 if is_fp4 else 448))).astype(np.int32)
        scaled = np.ldexp(groups, -exponents[..., None])
        codes, values = round_fp4(scaled) if is_fp4 else (scaled, float8(scaled).float().numpy())
        tensors = {".weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))}
        whole = codes.reshape(weight.shape)
        tensors |= {".weight_packed": bytes_of(whole)} if is_fp4 else {".weight": float8(whole)}
        return Packed(tensors, np.ldexp(values, exponents[..., None]).reshape(weight.shape).astype(np.float32))

    return pack


def write_checkpoints(
    model: TinyModel, scheme: Scheme, directory: Path, has_shards: bool = False
) -> tuple[TinyModel, TinyModel]:
    """Writes a model's quantised checkpoint, and the plain one that it stands for.

    With ``has_shards``, the first shard has the values and the second the scales.
    """
    weights = load_file(model.path / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    plain = dict(weights)
    for name, weight in weights.items():
        if not scheme.is_packed(name):
            stored[name] = weight
            continue
        packed = scheme.pack_of(name)(weight.float().numpy(), np.random.default_rng(zlib.crc32(name.encode())))
        stored |= {name.removesuffix(scheme.own_name) + end: tensor for end, tensor in packed.tensors.items()}
        plain[name] = torch.from_numpy(packed.plain)
    config = json.loads((model.path / "config.json").read_text())
    paths = directory / "quantised", directory / "plain"
    configs = config | {"quantization_config": scheme.config}, config
    for path, tensors, own in zip(paths, (stored, plain), configs, strict=True):
        path.mkdir(parents=True)
        for file in model.path.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        (path / "config.json").write_text(json.dumps(own))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    if has_shards:
        _split(paths[0])
    return TinyModel(paths[0]), TinyModel(paths[1])


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 48]}
ORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}


def grouped(groups: Mapping[str, Mapping[str, Any]], pack: Pack, **packs: Pack) -> Scheme:
    """Scheme of compressed-tensors with settings of weights by target, in the groups' order; embeddings are packed,
    too."""
    own = {target: {"targets": [target], "weights": weights} for target, weights in groups.items()}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": own}
    plain = Scheme(config, pack)
    return replace(plain, is_packed=lambda name: plain.is_packed(name) or "embed_tokens" in name, packs=packs)


OF_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
GROUPS = {
    "re:.*self_attn.*": OF_GROUPS | {"symmetric": True},
    "Linear": OF_GROUPS,
    "Embedding": OF_GROUPS | {"num_bits": 8},
}
PACKS = {"self_attn": integers(4, 16, True), "embed_tokens": integers(8, 16, False)}
EXAMPLES = {
    "experts in blocks of FP8": ("qwen3-moe", Scheme(BLOCKS, fp8((16, 48), ".weight_scale_inv"))),
    "GPTQ in act order": ("qwen3", Scheme(ORDERED, gptq(4, 16, True))),
    "stacked experts in MXFP4": ("gpt-oss", Scheme({"quant_method": "mxfp4"}, mxfp4(), is_stack, "")),
    "permuted groups": ("llama", grouped(GROUPS, integers(4, 16, False), **PACKS)),
    "permuted groups, the class first": (
        "llama",
        grouped({each: GROUPS[each] for each in sorted(GROUPS)}, integers(4, 16, False), **PACKS),
    ),
}
"""Tiny models and schemes that differ in how weights are found: of layers, of single experts, of stacks of experts; and
in where their settings are found, by the layers' names and by their class."""


def _split(path: Path) -> None:
    """Divides a checkpoint into two shards: scales and other small parts, and the rest."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {}
    for name in tensors:
        is_small = name.endswith(("scale", "scale_inv", "scales", "zeros", "g_idx", "shape", "zero_point"))
        places[name] = f"model-0000{2 if is_small else 1}-of-00002.safetensors"
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
