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
        if environment.neuron_device_visible():
            return self._neuron_core()
        keep_freed_memory()
        if self.parallel_config.world_size > 1:
            environment.share_host_cores(self.parallel_config.local_world_size)
        import torch_xla

        return torch_xla.device()

    def _neuron_core(self) -> torch.device:
        """This rank's core, in one runtime with the other ranks'. Not run on Neuron hardware."""
        parallel = self.parallel_config
        if parallel.world_size > 1:
            root = parallel.master_addr if parallel.nnodes > 1 else "localhost"
            environment.share_neuron_cores(self.rank, self.local_rank, parallel.world_size, root)
        import torch_xla
        import torch_xla.core.xla_model as xm

        device = torch_xla.device()
        if parallel.world_size > 1:
            xm.set_replication(device, [device])  # Else the runtime counts one process.
        return device
