"""``compile_backend`` names a backend of Dynamo: ``neuron``, which comes with TorchNeuron, or any that is registered.

Nothing here needs torch_xla. Weights, caches and steps lie on torch's own device of Neuron, or on the host where there
is none, and every size is a graph of static shapes. Not run on Neuron hardware: tests take other backends on the host.
"""

from collections.abc import Callable, MutableSequence
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.utils

from model_runner_base.device_ops import DeviceOps, MemoryInfo
from model_runner_base.step.graph_policy import StepFunction, Wait
from model_runner_base.step.sizes import StepSize
from neuron_runner.buckets import NeuronBuckets
from neuron_runner.config import NeuronConfig


class DynamoPolicy(NeuronBuckets):
    """Compiles each size with torch.compile: in warm-up, or after the first sizes in pauses between requests."""

    compiles_in_pauses = True

    def __init__(self, config: NeuronConfig, num_workers: int = 1) -> None:
        super().__init__(config, num_workers)
        self.backend = config.backend

    def num_compilations(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return EachSize(function, self.backend)

    def compile_in_background(self, run: Callable[[], None]) -> Wait:
        """Calls ``run``, which traces, compiles and runs: Dynamo does all three in a function's first call."""
        run()
        return lambda: None


class TorchDeviceOps(DeviceOps):
    """DeviceOps of torch's own device of Neuron, by way of ``torch.accelerator``; or of the host."""

    @property
    def eager_device(self) -> torch.device:
        """The host, where towers stay (``model_runner.load_model``)."""
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        if self.device.type == "cpu":
            return super().memory_info()
        report = getattr(torch.accelerator, "get_memory_info", None)  # Since torch 2.10.
        return MemoryInfo(0, 0) if report is None else MemoryInfo(*report(self.device))

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class EachSize:
    """A function of tensors and sizes, compiled separately for each of its sizes and shapes; updates state in place."""

    def __init__(self, function: StepFunction, backend: str) -> None:
        self._function = function
        self._backend = backend
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(arg if isinstance(arg, StepSize) else (arg.shape, arg.dtype) for arg in args)
        compiled = self._compiled.get(key)
        if compiled is None:
            own = _with_code_of_its_own(self._function)
            compiled = self._compiled[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
        return compiled(*args)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` in one with its own code object: Dynamo keeps eight compilations of each, tried in turn."""

    def call(*args: Any) -> Any:
        return function(*args)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
