"""Counters of compilation work, to show that there is none after warm-up."""

from dataclasses import dataclass

import torch._dynamo.utils
import torch_xla.debug.metrics as met


@dataclass(frozen=True)
class CompilationCount:
    """Totals of this process so far; compare two of them."""

    compilations: int
    """Executables that XLA built."""
    captures: int
    """Graphs that Dynamo traced."""

    @classmethod
    def now(cls) -> "CompilationCount":
        return cls(
            compilations=met.counter_value("UncachedCompile") or 0,
            captures=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        )


def num_lowered() -> int:
    """Graphs that torch_xla has handed to XLA: from then on a compilation needs nothing of the graph's inputs.

    torch_xla notes the number of aliased inputs of each graph just before that; this is the number of notes.
    """
    data = met.metric_data("InputOutputAliasCount")
    return data[0] if data else 0
