"""Steps as CUDA graphs: captured when a size is first run, replayed from then on."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.platforms import current_platform

from model_runner_base.step.graph_policy import StepFunction
from model_runner_base.step.sizes import StepSize


class StepGraphs:
    """A function of a size and tensors, with a graph for every size whose mode is FULL."""

    def __init__(self, function: StepFunction, mode_of: Callable[[StepSize], CUDAGraphMode]) -> None:
        self._function = function
        self._mode_of = mode_of
        self._graphs: dict[StepSize, StepGraph] = {}
        self._pieces: set[int] = set()
        """Token counts whose pieces vLLM has captured."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any) -> Any:
        size = args[0]
        if not isinstance(size, StepSize):
            return self._function(*args)
        graph = self._graphs.get(size)
        if graph is not None:
            return graph.replay(*args[1:])
        mode = self._mode_of(size)
        if mode == CUDAGraphMode.FULL:
            graph = self._graphs[size] = StepGraph(self._function, *args)
            return graph.replay(*args[1:])
        if mode == CUDAGraphMode.PIECEWISE:
            return self._run_in_pieces(size, args)
        return self._function(*args)

    def _run_in_pieces(self, size: StepSize, args: tuple[Any, ...]) -> Any:
        if size.num_tokens not in self._pieces:
            self._pieces.add(size.num_tokens)
            self._function(*args)  # Kernels tune and compile themselves outside the captures.
        with _piecewise(size.num_tokens):
            return self._function(*args)


@contextmanager
def _piecewise(num_tokens: int) -> Iterator[None]:
    """Tells vLLM's pieces, through the forward context, to capture or replay."""
    context = get_forward_context()
    context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
    context.batch_descriptor = BatchDescriptor(num_tokens)
    try:
        yield
    finally:
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        context.batch_descriptor = None


class StepGraph:
    """One captured step.

    Its results lie in the memory pool that all graphs share, so they are valid until another graph is replayed. The
    packed buffer is not such a result. It has to last until the next step of this size, so it stays where it was
    captured: a replay reads it there and returns the same tensor.
    """

    def __init__(
        self, function: StepFunction, size: StepSize, packed: torch.Tensor, entries: torch.Tensor, *others: torch.Tensor
    ) -> None:
        """Captures the step. ``entries`` are those of a buffer that was just sent whole: they change nothing, now or in
        a replay."""
        self._packed = packed
        self._no_entries = entries
        self._others = others
        self._graph, (*self._results, _) = capture(function, (size, packed, entries, *others))

    def replay(self, packed: torch.Tensor, entries: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the step with these arguments; those at other addresses than the captured ones are copied there."""
        for captured, given in zip((self._packed, *self._others), (packed, *others), strict=True):
            if captured is not given and captured.data_ptr() != given.data_ptr():
                captured.copy_(given)
        if entries is not self._no_entries:
            # Written ahead of the graph: the captured entries are the sender's "no entries", and must stay as they are.
            self._packed.index_put_((entries[0],), entries[1])
        self._graph.replay()
        return *self._results, self._packed


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Leaves the objects that exist already out of torch's garbage collection before each capture, to save time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def capture(function: StepFunction, args: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """Captures a call. Returns its graph and its results, which do not keep memory of the shared pool in use."""
    function(*args)  # Kernels tune and compile themselves outside the capture.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool(), stream=torch.cuda.current_stream()):
        outputs = [output.contiguous() for output in function(*args)]
    return graph, tuple(map(_weak, outputs))


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not own the memory, so that the pool may reuse it for the next graphs."""
    assert tensor.is_contiguous()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
