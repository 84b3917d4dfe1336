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
        parallel = self.parallel_config
        if environment.neuron_device_visible():
            if parallel.world_size > 1:
                root = parallel.master_addr if parallel.nnodes > 1 else "localhost"
                environment.share_neuron_cores(self.rank, self.local_rank, parallel.world_size, root)
        else:
            keep_freed_memory()
            if parallel.world_size > 1:
                environment.share_host_cores(parallel.local_world_size)
        import torch_xla
        import torch_xla.core.xla_model as xm

        device = torch_xla.device()
        hardware = xm.xla_device_hw(device)
        environment.check_device(hardware)
        if hardware == "NEURON" and parallel.world_size > 1:
            xm.set_replication(device, [device])  # Else the runtime counts one process. Not run on Neuron hardware.
        logger.info("Steps run on %s (%s).", device, xm.xla_device_kind(device))
        return device
