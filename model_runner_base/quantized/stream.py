"""Stream of weights that pairs the parts of quantised weights as they come, and yields the weights that they make."""

from collections.abc import Iterable, Iterator

import torch

from model_runner_base.errors import CheckpointError
from model_runner_base.quantized.stored import StoredTensors
from model_runner_base.quantized.weight_format import UNUSED_ENDINGS, VALUES, WeightFormat


class Dequantiser:
    """Dequantises a stream of stored tensors to weights in ``dtype``, under the names that a plain checkpoint has.

    Parts are held until their weight is complete. With ``stored``, the checkpoint that the stream comes from, a weight
    is complete as soon as its values come: the other parts are read where they lie, which may be another shard.
    Tensors that are stored as they are pass through, and scales of activations and of KV caches are left out.
    """

    def __init__(self, form: WeightFormat, dtype: torch.dtype, stored: StoredTensors | None = None) -> None:
        self._form = form
        self._dtype = dtype
        self._stored = stored
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._done: set[str] = set()

    def weights(self, source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and weights; raises CheckpointError for a weight that lacks a part, or has one that does not
        fit."""
        for name, tensor in source:
            place = self._form.part_of(name, tensor.dtype)
            if place is None:
                if not name.endswith(UNUSED_ENDINGS):
                    self._done.add(name)
                    yield name, tensor
                continue
            weight, part = place
            if weight in self._done:
                continue  # This part was read before.
            parts = self._held.setdefault(weight, {})
            parts[part] = tensor
            if part == VALUES and self._stored is not None:
                parts |= read_parts(self._form, weight, parts, self._stored)
            if not self._form.missing(weight, parts):
                del self._held[weight]
                self._done.add(weight)
                yield weight, dequantise(self._form, weight, parts, self._dtype)
        for weight, parts in self._held.items():
            if weight not in self._done:
                raise CheckpointError(missing_part(self._form, weight, parts))


def read_parts(
    form: WeightFormat, weight: str, parts: dict[str, torch.Tensor], stored: StoredTensors
) -> dict[str, torch.Tensor]:
    """The parts of a weight that are stored and not known, those that are not needed too."""
    found = {}
    for part in form.part_names() - parts.keys():
        for name in form.names_of(weight, part):
            if name in stored:
                found[part] = stored.read(name)
                break
    return found


def dequantise(form: WeightFormat, weight: str, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    try:
        return form.dequantise(weight, parts, dtype)
    except (IndexError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{weight} cannot be dequantised from {form.title}: {reason}") from error


def missing_part(form: WeightFormat, weight: str, parts: dict[str, torch.Tensor]) -> str:
    """Message about the first part that a weight lacks."""
    name = form.names_of(weight, form.missing(weight, parts)[0])[0]
    return f"{name} is missing, and {form.title} needs it for {weight}"
