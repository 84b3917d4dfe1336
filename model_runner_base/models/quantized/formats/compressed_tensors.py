"""Checkpoints of the compressed-tensors library: integers and floats of 4 and 8 bits, packed or not."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from model_runner_base.models.quantized.arithmetic import scale_, scale_values, shift_, unpack_fp4, unpack_integers
from model_runner_base.models.quantized.formats.small_floats import FLOAT8
from model_runner_base.models.quantized.weight_format import VALUES, Fields, WeightFormat

_RENAMED = {"model", "language_model"}
"""Words of a layer's name that releases of transformers add, leave out and change in order, while a config keeps the
names that its layers had."""
_EMBEDDINGS = {"wte", "wpe"}
"""Names of embeddings without "embed" in them."""
_HEADS = {"embed_out"}
"""Names of heads with "embed" in them."""


class Targets:
    """Targets of all groups, or those that are ignored. One with ``re:`` is a pattern that a name begins with."""

    def __init__(self, targets: Iterable[str]) -> None:
        ordered = sorted(targets)
        self._names = {_stable_name(target): target for target in ordered if not target.startswith("re:")}
        self._patterns = {each: re.compile(each.removeprefix("re:")) for each in ordered if each.startswith("re:")}

    def by_name(self, layer: str) -> str | None:
        """The target that is a layer's name, else the first pattern in alphabetical order that the name fits.

        This is the order of the library that writes such files. It does not depend on the order of the groups.
        """
        patterns = (target for target, pattern in self._patterns.items() if pattern.match(layer))
        return self._names.get(_stable_name(layer)) or next(patterns, None)

    def by_class(self, layer: str) -> str | None:
        """The target that is the class of a layer's module."""
        return next((self._names[each] for each in _classes(layer) if each in self._names), None)


def _stable_name(layer: str) -> str:
    return ".".join(word for word in layer.split(".") if word not in _RENAMED)


def _classes(layer: str) -> tuple[str, ...]:
    """Classes of a layer's module in transformers or vLLM, told by the layer's name."""
    own = layer.rpartition(".")[2]
    if own in _EMBEDDINGS or ("embed" in own and "proj" not in own and own not in _HEADS):
        return ("Embedding",)
    # vLLM's classes of experts, which take the settings of Linear where no group has theirs.
    return ("RoutedExperts", "FusedMoE", "Linear") if ".experts." in layer else ("Linear",)


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
STORED_AS = {"int": {torch.int8, torch.int32}, "float": {torch.uint8, *FLOAT8}}
"""Dtypes of stored values by the ``type`` of their settings."""


class CompressedTensors(WeightFormat):
    """compressed-tensors: ``weight`` in int8 or float8, or ``weight_packed`` in words of integers or bytes of two FP4
    values, with ``weight_scale``. The library's own settings of a layer, in ``config_groups``, name further fields."""

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
        formats = [self.config.get("format"), *(group.get("format") for group in self._groups)]
        if others := [form for form in formats if form not in (None, *FORMATS)]:
            return f"format {others[0]}"
        for group in self._groups:
            if others := [each for each in group["targets"] if self._weights[each] != group.get("weights")]:
                return f"two groups for target {others[0]}"
        if (self.config.get("transform_config") or {}).get("config_groups"):
            return "transform_config"
        sparsity = (self.config.get("sparsity_config") or {}).get("format", "dense")
        return None if sparsity == "dense" else f"sparsity_config {sparsity}"

    def rounds_activations(self) -> bool:
        return any(group.get("input_activations") for group in self._groups)

    def field_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        is_plain_name = name.endswith(".weight") and dtype in {torch.int8, *FLOAT8}
        return (name, VALUES) if is_plain_name else super().field_of(name, dtype)

    @cached_property
    def _groups(self) -> list[Mapping[str, Any]]:
        return [{"targets": (), **group} for group in (self.config.get("config_groups") or {}).values()]

    @cached_property
    def _weights(self) -> dict[str, Mapping[str, Any] | None]:
        """Settings of weights by target; None for those of groups that quantise activations alone."""
        return {target: group.get("weights") for group in self._groups for target in group["targets"]}

    @cached_property
    def _targets(self) -> Targets:
        return Targets(self._weights)

    @cached_property
    def _ignored(self) -> Targets:
        return Targets(self.config.get("ignore") or ())

    def _settings(self, weight: str) -> Mapping[str, Any]:
        """Settings of a layer, by its name, else by its class; none if no target fits it."""
        layer = weight.removesuffix(".weight")
        target = self._targets.by_name(layer) or self._targets.by_class(layer)
        return (self._weights[target] if target else None) or {}

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        values, scale, settings = fields.get(VALUES), fields.get("scale"), self._settings(weight)
        needed = [VALUES, "scale"]
        if values is not None and values.dtype == torch.int32:
            needed.append("shape")
        # Older NVFP4 files have the strategy "group" too; their scales are float8, and MXFP4's are bytes.
        if settings.get("strategy") == "tensor_group" or (scale is not None and scale.dtype in FLOAT8):
            needed.append("global_scale")
        is_integer = values is not None and values.dtype in STORED_AS["int"]
        if is_integer and not settings.get("symmetric", True):
            needed.append("zero_point")
        if settings.get("actorder") in ORDERED:
            needed.append("groups")
        return needed

    def misfit(self, weight: str, fields: Fields) -> str | None:
        settings = self._settings(weight)
        if ignored := self._ignored.by_name(weight.removesuffix(".weight")):
            return f"ignore has {ignored}, so it should be stored as it is"
        if not settings:
            return "no target of config_groups that fits it has settings for weights"
        if "zero_point" in fields and settings.get("symmetric", True):
            return "its group says symmetric, and it has a zero point"
        if "groups" in fields and settings.get("actorder") not in ORDERED:
            return f"its group says actorder {settings.get('actorder')}, and it has weight_g_idx"
        values, kind, bits = fields.get(VALUES), settings.get("type", "int"), _bits(settings)
        if values is None:
            return None
        float_bits = 4 if values.dtype == torch.uint8 else 8
        if values.dtype not in STORED_AS.get(kind, ()) or (kind == "float" and bits != float_bits):
            dtype = str(values.dtype).removeprefix("torch.")
            return f"its group says {kind} of {bits} bits, and its values are stored in {dtype}"
        is_packed = values.dtype == torch.int32 and values.ndim == 2
        return _packed_misfit(fields, bits) if is_packed and "shape" in fields else None

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        settings, values = self._settings(weight), fields[VALUES]
        bits, zero, scale = _bits(settings), fields.get("zero_point"), scale_values(fields["scale"])
        if values.dtype == torch.int32:
            rows, columns = fields["shape"].tolist()
            values = unpack_integers(values, bits)[:, :columns].sub_(1 << bits - 1)
            if zero is not None and zero.dtype == torch.int32:
                zero = unpack_integers(zero.T, bits).T[:rows] - (1 << bits - 1)
        elif values.dtype == torch.uint8:
            values = unpack_fp4(values)
        values = values.float()
        if "global_scale" in fields:
            scale = scale / fields["global_scale"].float()
        if zero is not None:
            shift_(values, *self._blocks(zero.float(), values, fields, settings))
        return scale_(values, *self._blocks(scale, values, fields, settings))

    def _blocks(
        self, numbers: torch.Tensor, values: torch.Tensor, fields: Fields, settings: Mapping[str, Any]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Scales or zero points, and their blocks; with act order, ``weight_g_idx`` has each input's group."""
        groups = fields.get("groups")
        if groups is not None and settings.get("actorder") in ORDERED:
            if groups.shape != values.shape[-1:]:
                raise ValueError(f"weight_g_idx has shape {list(groups.shape)} for {values.shape[-1]} inputs")
            return numbers.index_select(1, groups.int()), (1, 1)
        block = settings.get("block_structure") or (1, max(settings.get("group_size") or 1, 1))
        return numbers, tuple(map(int, block.split("x") if isinstance(block, str) else block))


def _bits(settings: Mapping[str, Any]) -> int:
    return int(settings.get("num_bits", 8))


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that so many integers take."""
    return -(-count // (32 // bits))


def _packed_misfit(fields: Fields, bits: int) -> str | None:
    """Message about words that do not hold as many integers of so many bits as ``weight_shape`` says."""
    rows, columns = shape = fields["shape"].tolist()
    zero = fields.get("zero_point")
    checked = {"weight_packed": (list(fields[VALUES].shape), [rows, _words(columns, bits)])}
    if zero is not None and zero.dtype == torch.int32:
        checked["weight_zero_point"] = (list(zero.shape[:1]), [_words(rows, bits)])
    for name, (found, wanted) in checked.items():
        if found != wanted:
            return f"{name} has {found} words, and {bits} bits, as its group says, take {wanted} for {shape} numbers"
    return None
