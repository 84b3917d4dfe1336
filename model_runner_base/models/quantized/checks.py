"""Checks of a quantised checkpoint's headers, before any weight is read."""

import torch

from model_runner_base.errors import CheckpointError
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import dequantise, misfit, missing_part
from model_runner_base.models.quantized.weight_format import VALUES, WeightFormat

Groups = dict[str, dict[str, str]]
"""Stored names by weight and part."""


def first_fault(form: WeightFormat, stored: StoredTensors) -> str | None:
    """Message about the first weight that is stored otherwise than the config says, or that lacks a part; None if all
    are right."""
    for name, entry in stored.entries.items():
        if form.part_of(name, entry.dtype) is None and (message := form.unread(name, entry.dtype)):
            return message
    for weight, names in _quantised(form, stored).items():
        parts = _parts(names, stored)
        if message := misfit(form, weight, parts):
            return message
        if form.missing(weight, parts):
            return missing_part(form, weight, parts)
    return None


def plain_shapes(form: WeightFormat, stored: StoredTensors) -> dict[str, list[int]]:
    """Shapes of the weights that a stored checkpoint is dequantised to, without reading a weight.

    Raises CheckpointError for parts that are missing or do not fit each other.
    """
    if fault := first_fault(form, stored):
        raise CheckpointError(fault)
    shapes = {}
    for name, entry in stored.entries.items():
        if form.part_of(name, entry.dtype) is None:
            shapes[name] = entry.shape
    for weight, names in _quantised(form, stored).items():
        shapes[weight] = list(dequantise(form, weight, _parts(names, stored), torch.float32).shape)
    return shapes


def _parts(names: dict[str, str], stored: StoredTensors) -> dict[str, torch.Tensor]:
    """Parts without their numbers, but for a stored shape, which others are compared with."""
    return {part: stored.read(name) if part == "shape" else stored.like(name) for part, name in names.items()}


def _quantised(form: WeightFormat, stored: StoredTensors) -> Groups:
    """Quantised weights. A scale without values belongs to none if the weight is stored as it is."""
    groups: Groups = {}
    for name, entry in stored.entries.items():
        if place := form.part_of(name, entry.dtype):
            weight, part = place
            groups.setdefault(weight, {})[part] = name
    return {weight: names for weight, names in groups.items() if VALUES in names or weight not in stored}
