"""Checks of a quantised checkpoint's headers, before any weight is read."""

import torch

from model_runner_base.errors import CheckpointError
from model_runner_base.quantized.stored import StoredTensors
from model_runner_base.quantized.stream import dequantise, missing_part
from model_runner_base.quantized.weight_format import VALUES, WeightFormat

Groups = dict[str, dict[str, str]]
"""Stored names by weight and part."""


def missing_tensor(form: WeightFormat, stored: StoredTensors) -> str | None:
    """Message about the first tensor that a quantised weight needs and that is not stored; None if none is missing."""
    for weight, names in _quantised(form, stored).items():
        parts = {part: stored.like(name) for part, name in names.items()}
        if form.missing(weight, parts):
            return missing_part(form, weight, parts)
    return None


def plain_shapes(form: WeightFormat, stored: StoredTensors) -> dict[str, list[int]]:
    """Shapes of the weights that a stored checkpoint is dequantised to, without reading a weight.

    Raises CheckpointError for parts that are missing or do not fit each other.
    """
    if fault := missing_tensor(form, stored):
        raise CheckpointError(fault)
    shapes = {}
    for name, entry in stored.entries.items():
        if form.part_of(name, entry.dtype) is None:
            shapes[name] = entry.shape
    for weight, names in _quantised(form, stored).items():
        # What follows depends on the numbers of a stored shape.
        parts = {part: stored.read(name) if part == "shape" else stored.like(name) for part, name in names.items()}
        shapes[weight] = list(dequantise(form, weight, parts, torch.float32).shape)
    return shapes


def _quantised(form: WeightFormat, stored: StoredTensors) -> Groups:
    """Quantised weights. A scale without values belongs to none if the weight is stored as it is."""
    groups: Groups = {}
    for name, entry in stored.entries.items():
        if place := form.part_of(name, entry.dtype):
            weight, part = place
            groups.setdefault(weight, {})[part] = name
    return {weight: names for weight, names in groups.items() if VALUES in names or weight not in stored}
