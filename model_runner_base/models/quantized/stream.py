"""Weights of a quantised checkpoint, each made of stored fields: paired as they come, or checked before any is read."""

from collections.abc import Iterable, Iterator

import torch

from model_runner_base.errors import CheckpointError
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.weight_format import UNUSED_ENDINGS, VALUES, Fields, WeightFormat


class Dequantiser:
    """Dequantises a stream of stored tensors to weights in ``dtype``, under the names that a plain checkpoint has.

    Fields are held until their weight is complete. With ``stored``, the checkpoint that the stream comes from, a weight
    is complete as soon as its values come: the other fields are read where they lie, which may be another shard.
    Tensors that are stored as they are pass through, and scales of activations and of KV caches are left out.
    """

    def __init__(self, form: WeightFormat, dtype: torch.dtype, stored: StoredTensors | None = None) -> None:
        self._form = form
        self._dtype = dtype
        self._stored = stored
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._done: dict[str, dict[str, torch.Tensor]] = {}
        """Fields that each finished weight was made of, as meta tensors; none for one that was stored as it is, and for
        one whose fields were all read where they lie."""

    def weights(self, source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and weights of a whole checkpoint; raises CheckpointError for a weight that lacks a field, or
        has one that does not fit."""
        yield from self.chunk(source)
        self.end()

    def chunk(self, source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and weights that are complete with a chunk; ``end`` follows the last chunk."""
        for name, tensor in source:
            place = self._form.field_of(name, tensor.dtype)
            if place is None:
                if not name.endswith(UNUSED_ENDINGS):
                    if message := self._form.unread(name, tensor.dtype):
                        raise CheckpointError(message)
                    self._done[name] = {}
                    yield name, tensor
                continue
            weight, field = place
            if weight in self._done:
                self._check_late(weight, field, tensor)
                continue
            fields = self._held.setdefault(weight, {})
            fields[field] = tensor
            if field == VALUES and self._stored is not None:
                fields |= read_fields(self._form, weight, fields, self._stored)
            if not self._form.missing(weight, fields):
                del self._held[weight]
                self._done[weight] = _without_numbers(fields) if self._stored is None else {}
                yield weight, dequantise(self._form, weight, fields, self._dtype)

    def copy_held(self) -> None:
        """Copies the fields that are held, so that their sender may overwrite them."""
        for fields in self._held.values():
            fields.update({field: tensor.clone() for field, tensor in fields.items()})

    def end(self) -> None:
        """Raises CheckpointError for a weight that lacks a field."""
        for weight, fields in self._held.items():
            if weight not in self._done:
                raise CheckpointError(misfit(self._form, weight, fields) or missing_field(self._form, weight, fields))

    def _check_late(self, weight: str, field: str, tensor: torch.Tensor) -> None:
        """Raises CheckpointError for a field that a weight was made without, and that says something else about it."""
        used = self._done[weight]
        if used and field not in used and (message := misfit(self._form, weight, used | {field: tensor})):
            raise CheckpointError(message)


def _without_numbers(fields: Fields) -> dict[str, torch.Tensor]:
    return {field: torch.empty_like(fields[field], device="meta") for field in fields if field != "shape"}


def read_fields(
    form: WeightFormat, weight: str, fields: dict[str, torch.Tensor], stored: StoredTensors
) -> dict[str, torch.Tensor]:
    """The fields of a weight that are stored and not known, those that are not needed too."""
    found = {}
    for field in form.field_names() - fields.keys():
        for name in form.names_of(weight, field):
            if name in stored:
                found[field] = stored.read(name)
                break
    return found


def dequantise(form: WeightFormat, weight: str, fields: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if message := misfit(form, weight, fields):
        raise CheckpointError(message)
    try:
        return form.dequantise(weight, fields, dtype)
    except (IndexError, RuntimeError, ValueError) as error:
        raise CheckpointError(_refused(form, weight, str(error).partition("\n")[0])) from error


def misfit(form: WeightFormat, weight: str, fields: Fields) -> str | None:
    """Message about a weight that is stored otherwise than the config says; None if it fits."""
    reason = form.misfit(weight, fields)
    return None if reason is None else _refused(form, weight, reason)


def _refused(form: WeightFormat, weight: str, reason: str) -> str:
    return f"{weight} cannot be dequantised from {form.title}: {reason}"


def missing_field(form: WeightFormat, weight: str, fields: dict[str, torch.Tensor]) -> str:
    """Message about the first field that a weight lacks."""
    name = form.names_of(weight, form.missing(weight, fields)[0])[0]
    return f"{name} is missing, and {form.title} needs it for {weight}"


Groups = dict[str, dict[str, str]]
"""Stored names by weight and field."""


def first_fault(form: WeightFormat, stored: StoredTensors) -> str | None:
    """Message about the first weight that is stored otherwise than the config says, or that lacks a field; None if all
    are right."""
    for name, entry in stored.entries.items():
        if form.field_of(name, entry.dtype) is None and (message := form.unread(name, entry.dtype)):
            return message
    for weight, names in _quantised(form, stored).items():
        fields = _fields(names, stored)
        if message := misfit(form, weight, fields):
            return message
        if form.missing(weight, fields):
            return missing_field(form, weight, fields)
    return None


def plain_shapes(form: WeightFormat, stored: StoredTensors) -> dict[str, list[int]]:
    """Shapes of the weights that a stored checkpoint is dequantised to, without reading a weight.

    Raises CheckpointError for fields that are missing or do not fit each other.
    """
    if fault := first_fault(form, stored):
        raise CheckpointError(fault)
    shapes = {}
    for name, entry in stored.entries.items():
        if form.field_of(name, entry.dtype) is None:
            shapes[name] = entry.shape
    for weight, names in _quantised(form, stored).items():
        shapes[weight] = list(dequantise(form, weight, _fields(names, stored), torch.float32).shape)
    return shapes


def _fields(names: dict[str, str], stored: StoredTensors) -> dict[str, torch.Tensor]:
    """Fields without their numbers, but for a stored shape, which others are compared with."""
    return {field: stored.read(name) if field == "shape" else stored.like(name) for field, name in names.items()}


def _quantised(form: WeightFormat, stored: StoredTensors) -> Groups:
    """Quantised weights. A scale without values belongs to none if the weight is stored as it is."""
    groups: Groups = {}
    for name, entry in stored.entries.items():
        if place := form.field_of(name, entry.dtype):
            weight, field = place
            groups.setdefault(weight, {})[field] = name
    return {weight: names for weight, names in groups.items() if VALUES in names or weight not in stored}
