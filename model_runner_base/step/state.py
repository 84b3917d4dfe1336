"""Tensors that a graph updates in place: each owner appends its own before the graph is made.

A policy that compiles a function may replace the tensors by new ones (``GraphPolicy.wrap``), so an owner reads its
tensors through the view that ``hold`` returned.
"""

from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any

import torch


class GraphState:
    """One list of tensors, of which each owner holds a part."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def hold(self, tensors: Sequence[torch.Tensor]) -> "HeldTensors":
        """Appends tensors; returns a view that always has the newest of them."""
        start = len(self.tensors)
        self.tensors += tensors
        return HeldTensors(self.tensors, start, len(self.tensors))


class HeldTensors(MutableSequence[torch.Tensor]):
    """View of one owner's part of a graph's state. It also serves as the state of a graph that updates no other
    part."""

    def __init__(self, tensors: list[torch.Tensor], start: int, stop: int) -> None:
        self._tensors = tensors
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self._tensors[place] for place in self._range[index]]
        return self._tensors[self._range[index]]

    def __setitem__(self, index, tensor):  # type: ignore[no-untyped-def]
        self._tensors[self._range[index]] = tensor

    def __delitem__(self, index: Any) -> None:
        raise TypeError("the number of tensors in a graph's state is fixed")

    def insert(self, index: int, tensor: torch.Tensor) -> None:
        del self[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors[self._range.start : self._range.stop])
