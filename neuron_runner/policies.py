"""Graph policy and DeviceOps of each ``neuron_config.compile_backend``."""

import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import GraphPolicy
from neuron_runner.config import NeuronConfig


def policy_for(config: NeuronConfig, num_workers: int) -> GraphPolicy:
    """The graph policy of the backend. Imports torch_xla if the backend needs it, as ``device_ops_for`` does."""
    if not config.runs_on_xla:
        from neuron_runner.dynamo import DynamoPolicy

        return DynamoPolicy(config, num_workers)
    from neuron_runner.graph_policy import OpenXlaPolicy
    from neuron_runner.torch_compile import TorchCompilePolicy

    return (OpenXlaPolicy if config.backend == "openxla" else TorchCompilePolicy)(config, num_workers)


def device_ops_for(config: NeuronConfig, device: torch.device) -> DeviceOps:
    if not config.runs_on_xla:
        from neuron_runner.dynamo import TorchDeviceOps

        return TorchDeviceOps(device)
    from neuron_runner.device_ops import XlaDeviceOps

    return XlaDeviceOps(device)
