"""The graph policies by ``neuron_config.compile_backend``."""

from collections.abc import Callable

from model_runner_base.graph_policy import GraphPolicy
from neuron_runner.config import NeuronConfig
from neuron_runner.graph_policy import OpenXlaPolicy
from neuron_runner.torch_compile import TorchCompilePolicy

POLICIES: dict[str, Callable[[NeuronConfig, int], GraphPolicy]] = {
    "openxla": OpenXlaPolicy,
    "torch.compile": TorchCompilePolicy,
}
