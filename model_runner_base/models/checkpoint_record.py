"""Record of the checkpoint that a model was loaded from: which tensors it had, and which of them the model took.

A model leaves some tensors out, such as those of layers for drafts, and only it knows which. So a later checkpoint is
held against this record, and not against the names that another implementation of the model has.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model_runner_base.models.weight_places import tensors_in

ATTRIBUTE = "checkpoint_record"
"""Attribute of a loaded model that holds its record."""
_NAME = "name_in_checkpoint"
"""Attribute of a tensor on its way into a model."""


@dataclass
class CheckpointRecord:
    """Tensors of a checkpoint, by their names in it."""

    names: set[str] = field(default_factory=set)
    """Names of all tensors that were read, as they are stored and as the model is offered them."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of those that the model took. A quantised weight has its shape after dequantisation."""

    def read(self, source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors as they are stored."""
        for name, tensor in source:
            self.names.add(name)
            yield name, tensor

    def offer(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors to the model, with marks by which ``watching`` knows them."""
        for name, tensor in weights:
            self.names.add(name)
            setattr(tensor, _NAME, name)
            yield name, tensor

    def watching(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The function ``load``, which gives a model the weights, and during which the taken ones are noted."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with _Watch(self):
                return load(*args, **kwargs)

        return watched


class _Watch(TorchFunctionMode):
    """Context in which a tensor counts as taken once an operation on it writes or returns a tensor: a model passes over
    others by name, or by their shape."""

    def __init__(self, record: CheckpointRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if result is not None and next(tensors_in((result,)), None) is None:
            return result
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            if (name := getattr(tensor, _NAME, None)) is not None:
                self._record.shapes[name] = list(tensor.shape)
        return result


def record_of(model: nn.Module) -> CheckpointRecord | None:
    """The record of a loaded model; None if it was loaded without a stream of weights, as by ``load_format=dummy``."""
    record: CheckpointRecord | None = getattr(model, ATTRIBUTE, None)
    return record if record is not None and record.shapes else None
