"""The worker half that every device shares: a device names its runner class and its torch device, no more."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tasks import SupportedTask
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from model_runner_base.memory import DeviceMemoryProfiler
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.platform import PagedPlatform

logger = init_logger(__name__)


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """vLLM's executor hears of rank 0's errors alone. Another rank that went on after one would meet the others a
    collective late, and add what does not belong together."""
    try:
        yield
    except Exception:
        logger.exception("This worker failed in a step, so it ends; the engine ends with it.")
        os._exit(1)


class ModelRunnerWorker(WorkerBase):
    """vLLM's worker over a ModelRunnerBase."""

    model_runner_cls: type[ModelRunnerBase]
    model_runner: ModelRunnerBase  # type: ignore[assignment]

    def make_device(self) -> torch.device:
        """The torch device of this worker's rank."""
        raise NotImplementedError

    # ---- Start-up, in the order the engine calls it ----

    def init_device(self) -> None:
        self.device = self.make_device()
        parallel = self.parallel_config
        PagedPlatform.num_local_workers = parallel.local_world_size
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)
        self._inference_mode = current_platform.inference_mode()  # Torch's may be entered again and again.
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)
        self.measure_at_start()

    def measure_at_start(self) -> None:
        """Notes what is free; raises ValueError where that is less than the share that the KV cache may need."""
        self._memory_at_start = memory = self.model_runner.device_ops.memory_info()
        if not memory.total and not self.cache_config.kv_cache_memory_bytes:
            raise ValueError("the device does not report its memory: set kv_cache_memory_bytes")
        utilization = self.cache_config.gpu_memory_utilization
        self._allowed_memory = math.ceil(memory.total * utilization)
        if not self.cache_config.kv_cache_memory_bytes and memory.free < self._allowed_memory:
            raise ValueError(
                f"{memory.free / GiB_bytes:.2f} of the device's {memory.total / GiB_bytes:.2f} GiB are free, less than "
                f"the {self._allowed_memory / GiB_bytes:.2f} GiB that gpu_memory_utilization={utilization} asks for: "
                "lower it, or free the device of other processes"
            )

    def load_model(self) -> None:
        with (
            set_current_vllm_config(self.vllm_config),
            DeviceMemoryProfiler(self.model_runner.device_ops) as profiler,
            self.model_runner.device_ops.memory_pool("weights"),
        ):
            self.model_runner.load_model()
        logger.info("Loading the model took %.2f GiB of device memory.", profiler.consumed_memory / GiB_bytes)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self.model_runner.get_supported_tasks()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes for this rank's KV cache: what was asked for, else the allowed share of the device less the model.

        No more than may come to use. As vLLM counts it: the share is of the whole device and must have been free; what
        others hold beside it is theirs.
        """
        with current_platform.inference_mode():
            step_memory = self.model_runner.profile_run()
        memory = self.model_runner.device_ops.memory_info()
        useful = self.model_runner.useful_cache_memory()
        if asked := self.cache_config.kv_cache_memory_bytes:
            asked = int(min(asked, useful))
            # All ranks have loaded their weights by now: what is free is theirs to share.
            free = memory.free // self._num_sharing()
            if memory.total and asked + step_memory > free:
                raise ValueError(
                    f"a KV cache of {asked / GiB_bytes:.2f} GiB and {step_memory / GiB_bytes:.2f} GiB for the largest "
                    f"step do not fit the {free / GiB_bytes:.2f} GiB that are free for a worker: lower "
                    "kv_cache_memory_bytes, max_num_batched_tokens, max_num_seqs or max_model_len"
                )
            return asked
        taken = self._memory_at_start.free - memory.free
        return int(min(useful, max(0, self._allowed_memory - taken - step_memory)))

    def _num_sharing(self) -> int:
        """Workers whose device memory is one and the same, this one among them."""
        # Not asked by getattr: vLLM's platforms answer None for whatever they do not have.
        shares = isinstance(current_platform, PagedPlatform) and current_platform.shares_host_memory()
        return self.parallel_config.local_world_size if shares else 1

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def compile_or_warm_up_model(self) -> None:
        ops = self.model_runner.device_ops
        with self._failing_together(), current_platform.inference_mode(), DeviceMemoryProfiler(ops) as profiler:
            self.model_runner.capture_model()
        logger.info("Graphs and warm-up took %.2f GiB of device memory.", profiler.consumed_memory / GiB_bytes)
        # Building and profiling the model must not move the seed of what follows.
        set_random_seed(self.model_config.seed)

    # ---- Steps ----

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        with self._failing_together(), self._inference_mode:
            return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        with self._failing_together(), self._inference_mode:
            return self.model_runner.sample_tokens(grammar_output)

    def _failing_together(self) -> AbstractContextManager:
        """Within it, a rank whose error nobody would hear of ends its process, and with it the engine."""
        return nullcontext() if self.rank == 0 else _ending_the_process()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None

    # ---- Everything else the engine may ask ----

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads other weights in place; the user then resets the prefix cache, which holds keys of the old ones."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(*args, **kwargs)

    def update_max_model_len(self, max_model_len: int) -> None:
        """The engine fitted the model length to the memory that is left."""
        self.model_runner.update_max_model_len(max_model_len)
        self.model_config.max_model_len = max_model_len

    def reset_encoder_cache(self) -> None:
        """There is none: text-only models keep no encoder outputs."""

    def execute_dummy_batch(self) -> None:
        """Only data-parallel ranks without requests are asked for this, and limits.py refuses data parallelism."""
        raise NotImplementedError

    def profile(self, is_start: bool = True) -> None:
        raise RuntimeError("Profiler is not enabled.")
