"""Checkpoints of the compressed-tensors library: integers and floats of 4 and 8 bits, packed or not."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from model_runner_base.quantized.arithmetic import scale_, scale_values, shift_, unpack_fp4, unpack_integers
from model_runner_base.quantized.formats.fp8 import FLOAT8
from model_runner_base.quantized.weight_format import VALUES, Parts, WeightFormat

FORMATS = (
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
ORDERED = ("group", "dynamic", True)
"""Values of ``actorder`` with which inputs of a group do not lie together."""


class CompressedTensors(WeightFormat):
    """compressed-tensors: ``weight`` in int8 or float8, or ``weight_packed`` in words of integers or bytes of two FP4
    values, with ``weight_scale``. The library's own settings of a layer, in ``config_groups``, name further parts."""

    title = "compressed-tensors"
    endings = {  # noqa: RUF012
        ".weight_packed": (VALUES, ".weight"),
        ".weight_global_scale": ("global_scale", ".weight"),
        ".weight_scale": ("scale", ".weight"),
        ".weight_zero_point": ("zero_point", ".weight"),
        ".weight_g_idx": ("groups", ".weight"),
        ".weight_shape": ("shape", ".weight"),
    }

    def unsupported_reason(self) -> str | None:
        groups = list((self.config.get("config_groups") or {}).values())
        formats = [self.config.get("format"), *(group.get("format") for group in groups)]
        if others := [form for form in formats if form not in (None, *FORMATS)]:
            return f"format {others[0]}"
        if (self.config.get("transform_config") or {}).get("config_groups"):
            return "transform_config"
        sparsity = (self.config.get("sparsity_config") or {}).get("format", "dense")
        return None if sparsity == "dense" else f"sparsity_config {sparsity}"

    def rounds_activations(self) -> bool:
        return any(group.get("input_activations") for group in (self.config.get("config_groups") or {}).values())

    def part_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        is_plain_name = name.endswith(".weight") and dtype in {torch.int8, *FLOAT8}
        return (name, VALUES) if is_plain_name else super().part_of(name, dtype)

    def _settings(self, weight: str) -> Mapping[str, Any]:
        """Settings of a layer: those of a group that names it, else those of the first group, which names its kind."""
        module = weight.removesuffix(".weight")
        groups = list((self.config.get("config_groups") or {}).values())
        for group in groups:
            for target in group.get("targets", ()):
                pattern = target.removeprefix("re:")
                if target == module or (pattern != target and re.match(pattern, module)):
                    return group.get("weights") or {}
        return (groups[0].get("weights") or {}) if groups else {}

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        values, settings = parts.get(VALUES), self._settings(weight)
        needed = [VALUES, "scale"]
        if values is not None and values.dtype == torch.int32:
            needed.append("shape")
        if settings.get("strategy") == "tensor_group":
            needed.append("global_scale")
        is_integer = values is not None and values.dtype in (torch.int8, torch.int32)
        if is_integer and not settings.get("symmetric", True):
            needed.append("zero_point")
        if settings.get("actorder") in ORDERED:
            needed.append("groups")
        return needed

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        settings, values = self._settings(weight), parts[VALUES]
        bits = settings.get("num_bits", 8)
        zero, scale = parts.get("zero_point"), scale_values(parts["scale"])
        if values.dtype == torch.int32:
            rows, columns = parts["shape"].tolist()
            values = unpack_integers(values, bits)[:, :columns].sub_(1 << bits - 1)
            if values.shape != (rows, columns):
                raise ValueError(f"weight_packed has {list(values.shape)} values, weight_shape says {[rows, columns]}")
            if zero is not None and zero.dtype == torch.int32:
                zero = unpack_integers(zero.T, bits).T[:rows] - (1 << bits - 1)
        elif values.dtype == torch.uint8:
            values = unpack_fp4(values)
        values = values.float()
        if "global_scale" in parts:
            scale = scale / parts["global_scale"].float()
        if zero is not None and "zero_point" in self.needed(weight, parts):
            shift_(values, *self._blocks(zero.float(), values, parts, settings))
        return scale_(values, *self._blocks(scale, values, parts, settings))

    def _blocks(
        self, numbers: torch.Tensor, values: torch.Tensor, parts: Parts, settings: Mapping[str, Any]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Scales or zero points, and their blocks; with act order, ``weight_g_idx`` has each input's group."""
        groups = parts.get("groups")
        if groups is not None and settings.get("actorder") in ORDERED:
            if groups.shape != values.shape[-1:]:
                raise ValueError(f"weight_g_idx has shape {list(groups.shape)} for {values.shape[-1]} inputs")
            return numbers.index_select(1, groups.int()), (1, 1)
        block = settings.get("block_structure") or (1, max(settings.get("group_size") or 1, 1))
        return numbers, tuple(map(int, block.split("x") if isinstance(block, str) else block))
