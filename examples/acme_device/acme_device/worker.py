"""The worker, and the runner with the four hooks."""

import torch

from acme_device.graphs import AcmePolicy
from acme_device.memory import AcmeDeviceOps, workspace
from model_runner_base import ModelRunnerBase, ModelRunnerWorker, estimate_step_memory, load_checkpoint


class AcmeModelRunner(ModelRunnerBase):
    def _cache_device_properties(self) -> None:
        self.device_ops = AcmeDeviceOps(self.device)
        if not self.model_config.enforce_eager:
            self.graph_policy = AcmePolicy()

    def load_model(self) -> None:
        self.model = load_checkpoint(self.vllm_config)
        self.device_ops.place(self.model)

    def profile_run(self) -> int:
        limits, config = self.step_limits(), self.model_config
        step = estimate_step_memory(limits.largest_sizes, limits, self.get_kv_cache_spec(), config)
        return step + workspace(limits, config.model_arch_config.total_num_attention_heads, config.get_head_size())

    def capture_model(self) -> None:
        self.warm_up(self.graph_policy.sizes or self.step_limits().largest_sizes)


class AcmeWorker(ModelRunnerWorker):
    model_runner_cls = AcmeModelRunner

    def make_device(self) -> torch.device:
        return torch.device("cpu")
