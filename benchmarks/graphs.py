"""A runner's model graph, run without a scheduler: on padding, or once more on what a step handed over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.forward_context import override_forward_context

from model_runner_base.step.packing import PackedStep
from model_runner_base.step.sizes import StepSize


class Graph(NamedTuple):
    """The model's graph at one size."""

    size: StepSize
    run: Callable[[], Any]


def arguments(runner: Any, step: PackedStep) -> list[Any]:
    """Arguments that the graph of a step takes after its size."""
    parts = runner.parts
    return [step.on_device, step.entries_on_device, *parts.rows.tensors, *parts.components.tensors]


def padded_graph(runner: Any, size: StepSize) -> Graph:
    """Runs a size on nothing but padding."""
    step = runner.parts.graph.pad(size)
    return Graph(size, lambda: _run(runner, size, *arguments(runner, step)))


@contextmanager
def recorded(runner: Any) -> Iterator[list[Graph]]:
    """The graphs that ``runner`` runs inside the block, in a list that grows; each can be run again as it was."""
    parts, graphs = runner.parts, []
    forward = parts.graph.forward

    def record(size: StepSize, packed: torch.Tensor, entries: torch.Tensor, *others: torch.Tensor) -> Any:
        graphs.append(
            Graph(size, lambda: _run(runner, size, packed, entries, *parts.rows.tensors, *parts.components.tensors))
        )
        return forward(size, packed, entries, *others)

    parts.bind_kv_caches()  # Tracing a new size reads the caches of now.
    parts.graph.forward = record
    try:
        yield graphs
    finally:
        parts.graph.forward = forward


def _run(runner: Any, size: StepSize, *tensors: torch.Tensor) -> Any:
    parts = runner.parts
    with torch.no_grad(), override_forward_context(parts.forward_context):
        return parts.graph.forward(size, *tensors)
