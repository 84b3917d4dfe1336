"""The worker of NeuronModelRunner."""

import os
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from model_runner_base.worker import ModelRunnerWorker
from neuron_runner import environment
from neuron_runner.allocator import keep_freed_memory
from neuron_runner.config import VARIABLES, read_neuron_config
from neuron_runner.model_runner import NeuronModelRunner

logger = init_logger(f"vllm.{__name__}")


class NeuronWorker(ModelRunnerWorker):
    model_runner_cls = NeuronModelRunner

    def init_device(self) -> None:
        super().init_device()
        self._check_options_of_ranks()

    def _check_options_of_ranks(self) -> None:
        """Raises ValueError if another rank was given other options: hosts have environments of their own."""
        if self.parallel_config.world_size == 1:
            return
        group = get_world_group()
        mine = read_neuron_config(self.vllm_config.additional_config).model_dump(exclude_unset=True)
        everyone: list[dict[str, Any]] = [{}] * group.world_size
        torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
        for rank, theirs in enumerate(everyone):
            if theirs != mine:
                raise ValueError(
                    f"rank {self.rank} was given the options {mine}, rank {rank} {theirs}: start every host with the "
                    f"same settings and the same {', '.join(VARIABLES)}"
                )

    def _root_host(self) -> str:
        """The host of rank 0, as all ranks can reach it."""
        if self.parallel_config.nnodes > 1:
            return self.parallel_config.master_addr  # vLLM then takes it in place of the init method.
        return environment.host_of(self.distributed_init_method)

    def make_device(self) -> torch.device:
        if self.model_config.enforce_eager:
            return torch.device("cpu")
        if not read_neuron_config(self.vllm_config.additional_config).runs_on_xla:
            device = environment.torch_device()
            logger.info("Steps run on torch's own device %s.", device)
            return device
        parallel = self.parallel_config
        if environment.neuron_device_visible():
            if parallel.world_size > 1:
                environment.share_neuron_cores(self.rank, self.local_rank, parallel.world_size, self._root_host())
        else:
            keep_freed_memory()
            if parallel.world_size > 1:
                environment.share_host_cores(self.num_local_workers)
        # Without its library for Neuron, torch_xla would silently fall back to the CPU when it is imported.
        os.environ.setdefault("PJRT_DEVICE", "NEURON" if environment.neuron_device_visible() else "CPU")
        import torch_xla
        import torch_xla.core.xla_model as xm

        device = torch_xla.device()
        hardware = xm.xla_device_hw(device)
        environment.check_device(hardware)
        if hardware == "NEURON" and parallel.world_size > 1:
            xm.set_replication(device, [device])  # Else the runtime counts one process. Not run on Neuron hardware.
        logger.info("Steps run on %s (%s).", device, xm.xla_device_kind(device))
        return device
