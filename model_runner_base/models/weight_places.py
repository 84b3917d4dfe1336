"""Notes which parameters a model's ``load_weights`` writes each tensor of a checkpoint to.

The method renames, stacks and cuts tensors in ways of its own, so names alone do not tell.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_WRITES = ("copy_", "fill_", "__setitem__", "__set__")
"""Names of torch's functions that write to their first argument; the last one assigns to an attribute, as ``.data``."""


class WeightPlaces(TorchFunctionMode):
    """Context in which tensors of a checkpoint are followed to parameters, each of which has a label.

    Whatever is computed of a followed tensor, or gets it written into it, is followed too. A view of a parameter counts
    as the parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {}
        """Labels of the parameters that each tensor was written to; none for a tensor that was left out."""
        self._names: Any = WeakTensorKeyDictionary()
        self._labels: Any = WeakTensorKeyDictionary()

    def expect(self, labels: Mapping[nn.Parameter, str]) -> None:
        """Sets the parameters that tensors may be written to, and their labels."""
        self._labels.update(labels)

    def follow(self, name: str, tensor: torch.Tensor) -> None:
        """Follows a tensor of the checkpoint from now on."""
        self.found.setdefault(name, set())
        self._names[tensor] = {name}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # torch cannot move a parameter to another device while a weak reference to it exists.
        self._names.data.clear()
        self._labels.data.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_write = func.__name__ in _WRITES
        outputs = [] if is_write else [x for x in tensors_in((result,)) if not isinstance(x, nn.Parameter)]
        if not is_write and not outputs:
            return result
        inputs = [*tensors_in((*args, *(kwargs or {}).values()))]
        names = set().union(*(self._names.get(tensor, ()) for tensor in inputs))
        label = self._labels.get(inputs[0]) if inputs else None
        if is_write and label is not None:
            for name in names:
                self.found[name].add(label)
        elif is_write and names:
            for written in filter(torch.is_tensor, (inputs[0], inputs[0]._base)):  # A view, and what it is a view of.
                self._names[written] = names.union(self._names.get(written, ()))
        for output in outputs:
            if names:
                self._names[output] = names
            if label is not None:
                self._labels[output] = label
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
