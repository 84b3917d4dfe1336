"""The worker of NeuronModelRunner."""

import torch

from model_runner_base.worker import ModelRunnerWorker
from neuron_runner import environment
from neuron_runner.allocator import keep_freed_memory
from neuron_runner.model_runner import NeuronModelRunner


class NeuronWorker(ModelRunnerWorker):
    model_runner_cls = NeuronModelRunner

    def make_device(self) -> torch.device:
        if self.model_config.enforce_eager:
            return torch.device("cpu")
        import torch_xla

        if not environment.neuron_device_visible():
            keep_freed_memory()
        return torch_xla.device()
