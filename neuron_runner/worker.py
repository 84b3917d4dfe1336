"""The worker of NeuronModelRunner."""

import torch
from vllm.logger import init_logger

from model_runner_base.worker import ModelRunnerWorker
from neuron_runner import environment
from neuron_runner.allocator import keep_freed_memory
from neuron_runner.model_runner import NeuronModelRunner

logger = init_logger(__name__)


class NeuronWorker(ModelRunnerWorker):
    model_runner_cls = NeuronModelRunner

    def make_device(self) -> torch.device:
        if self.model_config.enforce_eager:
            return torch.device("cpu")
        import torch_xla
        import torch_xla.core.xla_model as xm

        if not environment.neuron_device_visible():
            keep_freed_memory()
        device = torch_xla.device()
        environment.check_device(xm.xla_device_hw(device))
        logger.info("Steps run on %s (%s).", device, xm.xla_device_kind(device))
        return device
