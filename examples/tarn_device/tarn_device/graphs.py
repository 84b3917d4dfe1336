"""Three sizes of a step, and the small graphs of sampling, compiled at start; a later one would be an error."""

from collections.abc import MutableSequence
from typing import Any

import torch

from model_runner_base import BucketPolicy, StepLimits

# Dynamo gives up after 8 graphs of one function, and 256 of all.
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20


class TarnPolicy(BucketPolicy):
    backend = "aot_eager"  # your compiler, by its name in Dynamo
    num_compiled = 0
    is_closed = False

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        one = [limits.decode_size(1, limits.max_kv_tiles)] if limits.decodes else []
        self.set_sizes([*limits.largest_sizes, *one])

    def wrap(self, function: Any, state: MutableSequence[torch.Tensor]) -> Any:
        if getattr(function, "is_on_host", False):
            return function
        # Dynamo itself tells one size from another, and finds the tensors of ``state``.
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.compile)

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if self.is_closed:
            raise RuntimeError(f"a graph of {[tuple(x.shape) for x in inputs]} was not compiled at start")
        self.num_compiled += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

    def num_compilations(self) -> int:
        return self.num_compiled
