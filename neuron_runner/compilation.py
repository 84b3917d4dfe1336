"""Compilation by openxla: one Dynamo capture for each function and kind of step, one XLA executable for each size.

``torch.compile(backend="openxla")`` re-traces a model in Dynamo and AOTAutograd for every size, which costs several
times what XLA's own compilation does. Here Dynamo captures a function once with symbolic sizes, and the captured graph
is traced lazily by torch_xla for every size (``executable.py``), with AOTAutograd left out: nothing needs gradients. A
function of one size is captured with fixed sizes, which takes Dynamo a third of the time.

State that the function updates in place (KV caches, last tokens) is donated, so that XLA writes it in place. In the
captured graph each such input is cloned, which costs nothing under lazy tracing; the clone is updated instead and
returned ahead of the function's own outputs, since donated inputs and outputs pair by order. After a run the state
list holds the new tensors. The old ones are kept until later runs: dropping a donated buffer waits for the run that
consumes it.
"""

import math
import re
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as symbolic_shape_config
from torch.nn import functional
from torch.utils._sympy.printers import PythonPrinter

from model_runner_base.step.rounds import functions_as_one_node, loops_run_by, unrolled
from model_runner_base.step.sizes import StepSize
from neuron_runner.communicator import run_on_host
from neuron_runner.cutting import CutExecutable, CutGraph, donate, starts_of_pieces
from neuron_runner.executable import Compiler, Executable
from neuron_runner.masks import select_by_where

# Dynamo names a graph input after the expression it came from.
_INT_ARGUMENT = re.compile(r"L_ints_(\d+)_$")


class _Captured(BaseException):
    """Ends a capture as soon as the graph exists: Dynamo wraps an ``Exception`` of its backend."""


class Source(NamedTuple):
    """Origin of a graph input when the graph is run."""

    kind: str
    """"int", "tensor" or "state" (by place), "size" (of a tensor argument), or "constant" (weights and their sizes)."""
    place: int = 0
    dim: int = 0
    constant: Any = None


class Capture:
    """A function as Dynamo captured it, to be compiled for every combination of sizes that it is run with."""

    def __init__(
        self,
        function: Callable[..., Any],
        ints: list[int],
        tensors: list[torch.Tensor],
        state: Sequence[torch.Tensor],
        is_symbolic: bool = True,
    ) -> None:
        """``is_symbolic``: the capture serves other sizes too, as far as the branches that were taken allow."""
        self._graph, inputs = _trace(function, ints, tensors, is_symbolic)
        placeholders = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        sources = _find_sources(placeholders, inputs, tensors, state)
        self._guards = _SizeGuards(placeholders, sources, ints)
        self._shapes = {
            source.place: (node.meta["example_value"].shape, node.meta["example_value"].dtype)
            for node, source in zip(placeholders, sources, strict=True)
            if source.kind == "tensor"
        }
        self._sources = sources
        state_inputs = [i for i, source in enumerate(sources) if source.kind == "state"]
        self.state_order = [sources[i].place for i in state_inputs]
        """Indices of the state tensors that the first outputs replace, in the order of those outputs."""
        self._cut: CutGraph | None = None
        weights = {
            node: source.constant
            for node, source in zip(placeholders, sources, strict=True)
            if isinstance(source.constant, torch.Tensor)
        }
        starts = starts_of_pieces(self._graph, weights, state_inputs) if run_on_host() else set()
        if starts:
            self._cut = CutGraph(self._graph, state_inputs, starts)
        else:
            donate(self._graph, state_inputs)

    def fits(self, ints: list[int], tensors: list[torch.Tensor]) -> bool:
        """Whether the graph is right for these sizes too."""
        kinds_fit = all(
            tensors[index].dtype == dtype and tensors[index].dim() == len(shape)
            for index, (shape, dtype) in self._shapes.items()
        )
        shapes_fit = kinds_fit and all(
            isinstance(traced, torch.SymInt) or traced == size
            for index, (shape, _) in self._shapes.items()
            for traced, size in zip(shape, tensors[index].shape, strict=True)
        )
        return shapes_fit and self._guards.hold(ints, tensors)

    def at(
        self, compiler: Compiler, ints: list[int], tensors: list[torch.Tensor], state: Sequence[torch.Tensor]
    ) -> Executable | CutExecutable:
        """Compiles for the given sizes; what is returned runs on ``[*tensors, *state]``."""
        arguments: list[Any] = []
        varying: dict[int, int] = {}
        for index, (kind, place, dim, constant) in enumerate(self._sources):
            if kind == "tensor":
                varying[index] = place
                arguments.append(compiler.undonated(tensors[place]))
            elif kind == "state":
                varying[index] = len(tensors) + place
                arguments.append(state[place])
            elif kind == "constant":
                arguments.append(constant)
            else:
                arguments.append(ints[place] if kind == "int" else tensors[place].shape[dim])
        if self._cut is not None:
            return self._cut.at(compiler, arguments, varying, len(tensors) + len(state))
        return compiler.make(self._graph, arguments, varying)


def _find_sources(
    placeholders: list[torch.fx.Node], inputs: list[Any], tensors: list[torch.Tensor], state: Sequence[torch.Tensor]
) -> list[Source]:
    """The source of each graph input. Tensors are recognised by identity with the arguments of the traced call."""
    sources = {id(tensor): Source("tensor", index) for index, tensor in enumerate(tensors)}
    sources.update((id(tensor), Source("state", index)) for index, tensor in enumerate(state))
    sizes: dict[str, Source] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        source = sources.get(id(value))
        if source is not None and source.kind == "tensor":
            for dim, size in enumerate(node.meta["example_value"].shape):
                sizes.setdefault(str(size), Source("size", source.place, dim))

    def find(node: torch.fx.Node, value: Any) -> Source:
        if isinstance(value, torch.Tensor):
            # Models keep numbers in host tensors that are neither parameters nor buffers.
            return sources.get(id(value)) or Source("constant", constant=value.to(tensors[0].device))
        constant = Source("constant", constant=value)
        if match := _INT_ARGUMENT.match(str(node.target)):
            return Source("int", int(match[1]))
        return sizes.get(str(node.meta["example_value"]), constant)

    return [find(node, value) for node, value in zip(placeholders, inputs, strict=True)]


class _SizeGuards:
    """Assumptions that tracing made about the sizes: those it fixed, and the branches it took on the others.

    A guard that fails for a size of 1 and would hold for 2 is waived. Dynamo excludes 1 everywhere, for broadcasting
    and strides, but the graph computes the same for it.
    """

    def __init__(self, placeholders: list[torch.fx.Node], sources: list[Source], ints: list[int]) -> None:
        self._fixed = dict(enumerate(ints))
        # Keyed by the symbol that each size had at first: tracing may have found two equal since, and kept one.
        self._symbols: dict[str, Source] = {}
        shape_env = None
        for node, source in zip(placeholders, sources, strict=True):
            value = node.meta["example_value"]
            if source.kind == "int" and isinstance(value, torch.SymInt):
                shape_env = value.node.shape_env
                if not shape_env.replace(value.node.expr).is_number:
                    del self._fixed[source.place]
                    self._symbols[str(value.node._expr)] = source
            elif source.kind == "tensor":
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        shape_env = size.node.shape_env
                        self._symbols.setdefault(str(size.node._expr), Source("size", source.place, dim))
        self._guards: list[CodeType] = []
        self._hints: dict[str, int] = {}
        if shape_env is not None:
            # Sizes of state and weights are as they were when traced.
            self._hints = {str(symbol): int(hint) for symbol, hint in shape_env.var_to_val.items()}
            printer = PythonPrinter()
            guards = [guard.expr for guard in shape_env.guards]
            self._guards = [compile(printer.doprint(guard), "<size guard>", "eval") for guard in guards]

    def hold(self, ints: list[int], tensors: list[torch.Tensor]) -> bool:
        if any(ints[index] != value for index, value in self._fixed.items()):
            return False
        sizes = {
            name: ints[place] if kind == "int" else tensors[place].shape[dim]
            for name, (kind, place, dim, _) in self._symbols.items()
        }
        values = self._hints | sizes
        as_if_two = self._hints | {name: max(2, size) for name, size in sizes.items()}
        names = {"math": math}
        return all(eval(guard, names, values) or eval(guard, names, as_if_two) for guard in self._guards)


class CompiledFunction:
    """A function of tensors and of ``StepSize``s, whose kinds are static, compiled for each size it is called with.

    The function updates ``state`` in place; a call replaces the elements of that list by new tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        state: MutableSequence[torch.Tensor],
        compiler: Compiler | None = None,
        has_several: Callable[[Sequence[StepSize]], bool] = lambda sizes: True,
    ) -> None:
        """``has_several``, given the sizes of a call, tells whether calls of other sizes are to be expected."""
        self.function = function
        self.state = state
        self._compiler = compiler or Compiler()
        self._has_several = has_several
        self._compiler.states.append(state)
        self._captures: dict[Any, list[Capture]] = {}
        self._executables: dict[Any, tuple[Executable | CutExecutable, list[int]]] = {}
        self._retired: deque[list[torch.Tensor]] = deque(maxlen=3)

    def __call__(self, *args: Any) -> Any:
        """Runs the function. While the compiler is ahead, it only compiles, and returns zeros in place of results.

        State tensors among the arguments are recognised as such.
        """
        key = tuple(arg if isinstance(arg, StepSize) else (arg.shape, arg.dtype) for arg in args)
        executable, state_order = self._executables.get(key) or self._compile(key, args)
        if self._compiler.is_ahead:
            outputs = executable.stand_ins(len(state_order))
        else:
            outputs = executable.run([*(arg for arg in args if isinstance(arg, torch.Tensor)), *self.state])
            self._retired.append([*self.state])
            for index in state_order:
                self.state[index] = outputs.pop(0)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _compile(self, key: Any, args: tuple[Any, ...]) -> tuple[Executable | CutExecutable, list[int]]:
        sizes = tuple(arg for arg in args if isinstance(arg, StepSize))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        ints = [value for size in sizes for value in size.dims]
        capture = self._capture_for(args, sizes, ints, tensors)
        executable = capture.at(self._compiler, ints, tensors, self.state)
        self._executables[key] = executable, capture.state_order
        return self._executables[key]

    def _capture_for(self, args: Any, sizes: Any, ints: list[int], tensors: list[torch.Tensor]) -> Capture:
        """A capture that is right for these sizes: an existing one, else a new one."""
        captures = self._captures.setdefault(tuple(size.kind for size in sizes), [])
        for capture in captures:
            if capture.fits(ints, tensors):
                return capture
        captures.append(Capture(_flat(self.function, args), ints, tensors, self.state, self._has_several(sizes)))
        return captures[-1]


def _flat(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """``function`` as one of a list of ints and a list of tensors; the kind of each size stays static."""

    def traced(ints: list[int], tensors: list[torch.Tensor]) -> Any:
        rebuilt: list[Any] = []
        next_int = next_tensor = 0
        for arg in args:
            if isinstance(arg, StepSize):
                count = len(arg.dims)
                rebuilt.append(StepSize(arg.kind, tuple(ints[next_int : next_int + count])))
                next_int += count
            else:
                rebuilt.append(tensors[next_tensor])
                next_tensor += 1
        return function(*rebuilt)

    return traced


def _trace(
    traced: Callable[..., Any], ints: list[int], tensors: list[torch.Tensor], is_symbolic: bool
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph of ``traced``, and the values of its inputs at this call.

    Nothing is run, and Dynamo makes no guards, since the function that it would compile is not called again.
    """
    graphs: list[torch.fx.GraphModule] = []
    inputs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> NoReturn:
        graphs.append(graph)
        counters["stats"]["unique_graphs"] += 1  # As Dynamo counts it when its backend returns.
        inputs.extend(value.node.hint if isinstance(value, torch.SymInt) else value for value in example_inputs)
        raise _Captured

    torch._dynamo.reset()
    with (
        # Without duck shaping, sizes that happen to be equal at this call stay apart.
        symbolic_shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # Symbolic sizes are new in each capture: making entries for them costs more than the cache saves.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=not is_symbolic),
        mock.patch.object(functional, "layer_norm", _layer_norm),
        # Dynamo asks for every tensor; where there is no driver, each answer is a search for one.
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        functions_as_one_node(),
        loops_run_by(unrolled),  # Run lazily, the body of torch's own loop slices wrongly.
        suppress(_Captured),
    ):
        torch.compile(traced, backend=keep, dynamic=is_symbolic, fullgraph=True)(ints, tensors)
    torch._dynamo.reset()
    if not graphs:
        raise RuntimeError(
            "torch.compile did nothing: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, or set enforce_eager=True"
        )
    select_by_where(graphs[0])
    return graphs[0], inputs


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """F.layer_norm in elementary operations: the lazy device's own kernel cannot be traced with symbolic sizes."""
    dims = tuple(range(-len(normalized_shape), 0))
    centred = x.float() - x.float().mean(dims, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)
