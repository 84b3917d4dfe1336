"""Steps as graphs: one for each size, captured in warm-up and replayed from then on."""

from collections.abc import MutableSequence
from types import FunctionType
from typing import Any

import torch

from model_runner_base import BucketPolicy, StepLimits, StepSize


class AcmePolicy(BucketPolicy):
    num_captured = 0

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        rows = [1 << n for n in range((limits.max_num_reqs - 1).bit_length())]  # decode steps of 1, 2, 4, ... requests
        decode = [limits.decode_size(n, n * limits.max_kv_tiles) for n in rows if limits.decodes]
        self.set_sizes([*limits.largest_sizes, *decode])

    def wrap(self, function: Any, state: MutableSequence[torch.Tensor]) -> Any:
        graphs: dict[Any, Any] = {}

        def run(*args: Any) -> Any:
            key = tuple(arg if isinstance(arg, StepSize) else (arg.shape, arg.dtype) for arg in args)
            if key not in graphs:
                graphs[key] = torch.compile(copy_of(function), fullgraph=True, dynamic=False, backend=self.compile)
            return graphs[key](*args)

        return run

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_captured += 1
        return graph.forward  # your compiler

    def num_compilations(self) -> int:
        return self.num_captured


def copy_of(function: Any) -> Any:
    """A function with a code object of its own: Dynamo keeps eight graphs of a code object at most."""

    def call(*args: Any) -> Any:
        return function(*args)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
