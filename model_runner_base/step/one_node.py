"""Functions that are one node of a captured graph.

Dynamo takes some 10 ms for every operation on symbolic sizes, and it unrolls loops that a lazy device would run as
loops. A graph that is later run operation by operation, as on such a device, can be captured without a look inside a
function: the capture sees one call, and the shape of its result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_is_capturing = False


@contextmanager
def functions_as_one_node() -> Iterator[None]:
    """Makes each ``OneNode`` one node of every graph that Dynamo captures inside the block.

    Such a graph must be run operation by operation, eagerly or lazily; neither Dynamo nor AOTAutograd may trace it
    again.
    """
    global _is_capturing
    before, _is_capturing = _is_capturing, True
    try:
        yield
    finally:
        _is_capturing = before


def is_capturing() -> bool:
    """Whether the process is inside ``functions_as_one_node``."""
    return _is_capturing


class OneNode:
    """Wrapper of a function, which Dynamo takes for one operation inside ``functions_as_one_node``."""

    def __init__(
        self, function: Callable[..., torch.Tensor], result_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Takes the function, and one that makes a tensor of its result's shape from its first argument.

        The first argument is a tensor. The others are tensors, numbers, texts and None, or lists and dicts of these. A
        tensor that the function reads and that is no argument of it would be a constant of the graph.
        """

        def call(first: torch.Tensor, *others: Any) -> torch.Tensor:
            return result_of(first) if isinstance(first, FakeTensor) else function(first, *others)

        self._function = function
        self._call = torch._dynamo.allow_in_graph(call)

    def __call__(self, first: torch.Tensor, *others: Any) -> torch.Tensor:
        return self._call(first, *others) if _is_capturing else self._function(first, *others)
