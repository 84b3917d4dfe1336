"""The worker, and the runner with the four hooks."""

from typing import Any

import torch

import tarn_device.layers  # noqa: F401
from model_runner_base import ModelRunnerBase, ModelRunnerWorker, estimate_step_memory, load_checkpoint
from tarn_device.graphs import TarnPolicy
from tarn_device.sampler import on_host


class TarnModelRunner(ModelRunnerBase):
    def _cache_device_properties(self) -> None:
        # One KV tile is a whole cache line, so that a request is one pair of the plan. The base's own attention then
        # reads whole lines: a kernel should stop at the request's end.
        self.KV_TILE = self.CHUNK_KV_TILE = self.vllm_config.cache_config.block_size
        if not self.model_config.enforce_eager:
            self.graph_policy = TarnPolicy()

    def load_model(self) -> None:
        self.model = load_checkpoint(self.vllm_config).to(self.device)

    def profile_run(self) -> int:
        limits = self.step_limits()
        return estimate_step_memory(limits.largest_sizes, limits, self.get_kv_cache_spec(), self.model_config)

    def capture_model(self) -> None:
        self.warm_up(self.graph_policy.sizes or self.step_limits().largest_sizes)
        self.graph_policy.is_closed = True

    def make_sampler(self, mode: Any) -> Any:
        return on_host(super().make_sampler(mode))


class TarnWorker(ModelRunnerWorker):
    model_runner_cls = TarnModelRunner

    def make_device(self) -> torch.device:
        return torch.device("cpu")
