"""``compile_backend: "torch.compile"``: every size through torch.compile, with the backend as torch_xla ships it.

The reference that the usual path (``compilation.py``) is held against, and what is left should the bridge below it
change. It is slow: Dynamo and AOTAutograd trace a function anew for every size, graphs compile one after the other, and
torch_xla's bridge looks at every input again in every call.
"""

from collections.abc import Callable, MutableSequence
from types import FunctionType
from typing import Any

import torch

from model_runner_base.graph_policy import GraphPolicy, StepFunction
from model_runner_base.step.sizes import StepSize
from neuron_runner.graph_policy import OpenXlaPolicy


class TorchCompilePolicy(OpenXlaPolicy):
    """The sizes of openxla; each is traced and compiled when it is run for the first time, in warm-up."""

    make_ahead = GraphPolicy.make_ahead

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return EachSize(function)


class EachSize:
    """A function of tensors and sizes, compiled for each of its sizes and shapes by itself; updates state in place."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(arg if isinstance(arg, StepSize) else (arg.shape, arg.dtype) for arg in args)
        compiled = self._compiled.get(key)
        if compiled is None:
            own = _with_code_of_its_own(self._function)
            compiled = self._compiled[key] = torch.compile(own, fullgraph=True, dynamic=False, backend="openxla")
        return compiled(*args)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``function``. Dynamo keeps by code object what it compiled: eight at most, tried in turn."""

    def call(*args: Any) -> Any:
        return function(*args)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
