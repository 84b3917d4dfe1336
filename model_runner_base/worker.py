"""Worker base class of every device; a device only names its runner class and its torch device."""

import math
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.profiler.wrapper import TorchProfilerActivity, TorchProfilerWrapper, WorkerProfiler
from vllm.tasks import SupportedTask
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.system_utils import suppress_stdout
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import WorkerBase

from model_runner_base.admission.decode_context_limits import check_copies
from model_runner_base.caches.states import check_states_fit, states_memory
from model_runner_base.device_ops import MemoryInfo
from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.heads.outputs import (
    AsyncModelRunnerOutput,
    DraftTokenIds,
    FailedOutput,
    ModelRunnerOutput,
)
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.models.recurrent.memory import recurrence_memory
from model_runner_base.models.sharded_state import save_sharded_state
from model_runner_base.platform import PagedPlatform, check_serves_connectors, shares_host_memory
from model_runner_base.runner.memory import (
    DeviceMemoryProfiler,
    host_cache_memory,
    memory_line,
    offloaded_memory,
    weights_memory,
)
from model_runner_base.runner.weight_updates import WeightUpdates
from model_runner_base.step.schedule import GrammarOutput, SchedulerOutput
from model_runner_base.vllm_compat.patches.engine_processes import end_with_parent
from model_runner_base.vllm_compat.patches.shared_groups import leave_groups, make_expert_groups, use_groups
from model_runner_base.vllm_compat.probes.config import device_index, num_local_replicas, num_ray_workers
from model_runner_base.vllm_compat.types.kv_cache import KVCacheConfig, KVCacheSpec
from model_runner_base.vllm_compat.types.kv_connector import WorkerConnector, make_connector
from model_runner_base.vllm_compat.types.recurrent import has_states, recurrent_layers

logger = init_logger(f"vllm.{__name__}")


class CompilationTimes(NamedTuple):
    """Compilation times in seconds, with vLLM's names."""

    language_model: float
    encoder: float


class ModelRunnerWorker(WorkerBase):
    """vLLM worker with a ModelRunnerBase."""

    model_runner_cls: type[ModelRunnerBase]
    model_runner: ModelRunnerBase  # type: ignore[assignment]
    weight_updates: WeightUpdates
    """Updates by a trainer, which ``load_model`` makes."""
    num_local_workers: int
    """Number of this engine's workers on this host."""
    num_local_replicas = 1
    """Number of replicas of this engine on this host."""
    profiler_activities: Sequence[TorchProfilerActivity] = ("CPU",)
    """Activities that torch's profiler can record on this device."""
    _profiler: WorkerProfiler | None = None
    _connector: WorkerConnector | None = None
    _step_memory: int | None = None
    """Bytes that the largest step needs; None until the engine asks for the memory of the KV cache."""

    def make_device(self) -> torch.device:
        """Returns the torch device of this worker's rank, which may be the one at ``device_index``."""
        raise NotImplementedError

    @property
    def device_index(self) -> int:
        """Index of this worker's device among those that the process sees. Replicas of an engine take one after
        another."""
        return device_index(self.parallel_config, self.local_rank)

    # ---- Start-up, in the order the engine calls it ----

    def init_device(self) -> None:
        end_with_parent()
        parallel = self.parallel_config
        PagedPlatform.num_local_workers = self.num_local_workers = self._count_local_workers()
        self.num_local_replicas = num_local_replicas(parallel)
        self.device = self.make_device()
        make_expert_groups(self.model_config)
        # Gloo prints a line for each group, with the number of ranks that it connects to.
        with suppress_stdout() if current_platform.dist_backend == "gloo" else nullcontext():
            init_distributed_environment(
                parallel.world_size,
                self.rank,
                self.distributed_init_method,
                self.local_rank,
                current_platform.dist_backend,
            )
            ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                decode_context_model_parallel_size=parallel.decode_context_parallel_size,
            )
        use_groups(self)
        check_serves_connectors(current_platform, self.vllm_config)
        self._look_at_scheduler()
        set_random_seed(self.model_config.seed)
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)
        self.measure_at_start()

    def _look_at_scheduler(self) -> None:
        """Warns if the scheduler cannot end a single failed request; raises UnsupportedConfigError if it cannot give
        out states of recurrent layers that the model has."""
        cls = self.scheduler_config.get_scheduler_cls()
        if has_states(self.vllm_config) and not getattr(cls, "gives_states", False):
            raise UnsupportedConfigError(
                f"{cls.__module__}.{cls.__qualname__} does not give out states of recurrent layers: leave out "
                "scheduler_cls; where VLLM_PLUGINS is set, add model_runner_base to it"
            )
        ends_requests = getattr(cls, "reads_errors", False)
        FailedOutput.unread_by = None if ends_requests else f"{cls.__module__}.{cls.__qualname__}"
        if not ends_requests:
            logger.warning(
                "%s does not end requests that fail alone: one of them will end the engine. Inherit from "
                "model_runner_base.scheduling.RequestFailures before it, or leave out scheduler_cls; where "
                "VLLM_PLUGINS is set, add model_runner_base to it.",
                FailedOutput.unread_by,
            )

    def _count_local_workers(self) -> int:
        """Counts this engine's workers on this host. Called before ``make_device``, which may narrow the list of
        devices."""
        if not self.parallel_config.use_ray:
            return self.parallel_config.local_world_size
        # Under Ray, local_world_size counts all ranks.
        return num_ray_workers(self.parallel_config, current_platform.device_control_env_var)

    def measure_at_start(self) -> None:
        """Notes the free memory; raises ValueError if a device has less than the share of its own that the engine may
        use. Of the host's memory the engine takes what is free."""
        self._memory_at_start = memory = self.model_runner.device_ops.memory_info()
        if not memory.total and not self.cache_config.kv_cache_memory_bytes:
            raise ValueError("the device does not report its memory: set kv_cache_memory_bytes")
        if self._shares_host_memory():
            return
        utilization = self.cache_config.gpu_memory_utilization
        self._allowed_memory = math.ceil(memory.total * utilization)
        if not self.cache_config.kv_cache_memory_bytes and memory.free < self._allowed_memory:
            raise ValueError(
                f"{memory.free / GiB_bytes:.2f} of the device's {memory.total / GiB_bytes:.2f} GiB are free, less than "
                f"the {self._allowed_memory / GiB_bytes:.2f} GiB that gpu_memory_utilization={utilization} asks for: "
                "lower it, or free the device of other processes"
            )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model by ``load_config``. vLLM asks for dummy weights on ranks that join a running engine, which
        admission/limits.py refuses."""
        with (
            set_current_vllm_config(self.vllm_config),
            DeviceMemoryProfiler(self.model_runner.device_ops) as profiler,
        ):
            with self.model_runner.device_ops.memory_pool("weights"):
                self.model_runner.load_model()
            check_copies(self.model_runner.get_model(), self.vllm_config)
            # Outside of the pool of weights: no checkpoint can restore an encoder's outputs, or adapters in their
            # slots.
            self.model_runner.load_encoder()
            self.model_runner.load_adapters()
        # Other processes take and free the host's memory meanwhile.
        counted = weights_memory(self.model_runner.get_model()) + self.model_runner.adapters.slots_memory()
        self._weights_memory = counted if self._shares_host_memory() else profiler.consumed_memory
        self.weight_updates = WeightUpdates(self.model_runner, self.vllm_config, self.model_runner.device)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self.model_runner.get_supported_tasks()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes for this rank's KV cache: the requested number, or the allowed share of the device without the model
        and step.

        It is never more than can be used. The share counts as in vLLM: it is a share of the whole device, and it must
        have been free at the start; memory of other processes is not part of it. For the host's memory see
        ``host_cache_memory``.
        """
        with current_platform.inference_mode():
            step_memory = self.model_runner.profile_run() + self.model_runner.adapters.step_memory()
            step_memory += self.model_runner.encoder.step_memory()
        if recurrent := recurrent_layers(self.vllm_config):
            step_memory += recurrence_memory(recurrent.values(), self.model_runner.step_limits())
        self._step_memory = step_memory
        memory = self.model_runner.device_ops.memory_info()
        useful, states = self.model_runner.useful_cache_memory(), states_memory(self.vllm_config)
        offloaded = offloaded_memory(self.vllm_config) if self._shares_host_memory() else 0
        if asked := self.cache_config.kv_cache_memory_bytes:
            check_states_fit(self.vllm_config)
            asked = int(min(asked - states, useful))
            # All ranks have loaded their weights by now, so they share the free memory. Other replicas are not counted:
            # they may have taken their part of it already.
            free = memory.free // self._num_sharing()
            if memory.total and asked + states + step_memory + offloaded > free:
                on_host = f", {offloaded / GiB_bytes:.2f} GiB for blocks on the host" if offloaded else ""
                remedy = "kv_offloading_size, " if offloaded else ""
                raise ValueError(
                    f"a KV cache of {(asked + states) / GiB_bytes:.2f} GiB{on_host} and {step_memory / GiB_bytes:.2f} "
                    f"GiB for the largest step do not fit the {free / GiB_bytes:.2f} GiB that are free for a worker: "
                    f"lower {remedy}kv_cache_memory_bytes, max_num_batched_tokens, max_num_seqs or max_model_len (-1 "
                    "fits it to the KV cache alone: give a number)"
                )
            return asked
        if self._shares_host_memory():
            num_shares = self._num_sharing() * self.num_local_replicas
            share = current_platform.default_memory_share
            memory = MemoryInfo(free=memory.free // num_shares, total=memory.total // num_shares)
            specs, needed = self.model_runner.get_kv_cache_spec(), step_memory + states
            weights = self._weights_memory
            available = host_cache_memory(self.vllm_config, specs, memory, weights, needed, share, offloaded)
            return int(min(useful, available))
        taken = self._memory_at_start.free - memory.free
        return int(min(useful, max(0, self._allowed_memory - taken - step_memory - states)))

    def _shares_host_memory(self) -> bool:
        """Whether the device's memory is the host's."""
        return shares_host_memory(self.vllm_config)

    def _num_sharing(self) -> int:
        """Number of this engine's workers, this one included, that share one device memory."""
        return self.num_local_workers if self._shares_host_memory() else 1

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        states = states_memory(self.vllm_config)
        # vLLM does not ask for the memory that is left where no layer has a KV cache.
        if states and not self.get_kv_cache_spec() and self.determine_available_memory() <= 0:
            raise ValueError(
                f"the states of recurrent layers, {states / GiB_bytes:.2f} GiB, do not fit "
                f"gpu_memory_utilization={self.cache_config.gpu_memory_utilization}: raise it, or lower max_num_seqs"
            )
        self.model_runner.connector = self._connector = make_connector(self.vllm_config, kv_cache_config)
        self.model_runner.initialize_kv_cache(kv_cache_config)
        if self.is_driver_worker:
            weights, step = self._weights_memory, self._step_memory
            logger.info(memory_line(self.vllm_config, kv_cache_config, weights, step, states))

    def get_kv_connector_handshake_metadata(self) -> dict[Any, Any] | None:
        """Data that other engines need to reach this rank's caches, by rank; None if there is no such data."""
        return None if self._connector is None else self._connector.handshake()

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def compile_or_warm_up_model(self) -> CompilationTimes:  # type: ignore[override]
        """Makes all graphs that serving waits for; returns the seconds that it took, which some releases of vLLM ask
        for."""
        ops, start = self.model_runner.device_ops, time.perf_counter()
        with self.model_runner.step_guard, DeviceMemoryProfiler(ops) as profiler:
            self.model_runner.capture_model()
        num_sizes, num_left = len(self.model_runner.graph_policy.sizes), self.model_runner.background_compiler.num_left
        logger.info(
            "Warming up%s took %.0f s and %.2f GiB of device memory, graphs included.",
            f" {num_sizes - num_left} step sizes" if num_sizes else "",
            time.perf_counter() - start,
            profiler.consumed_memory / GiB_bytes,
        )
        # Building and profiling the model must not change the random numbers that follow.
        set_random_seed(self.model_config.seed)
        self.model_runner.background_compiler.start()
        return CompilationTimes(time.perf_counter() - start, 0.0)

    # ---- Steps ----

    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._profiler is not None:
            self._profiler.step()
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    # ---- Weights from a trainer, between two steps ----

    def get_draft_model(self) -> nn.Module | None:
        return self.model_runner.get_draft_model()

    def supports_draft_weight_updates(self) -> bool:
        return self.weight_updates.supports_drafts

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects to the trainer, by the engine of ``weight_transfer_config``."""
        self.weight_updates.init(init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """Ends the connection to the trainer."""
        self.weight_updates.disconnect()

    def start_weight_update(self) -> None:
        """Begins an update; no step may come before ``finish_weight_update``."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_updates.start()

    def start_draft_weight_update(self) -> None:
        """Begins an update of the draft model."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_updates.start(is_draft=True)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Loads one chunk. Of a list, the worker takes the part of its rank."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_updates.update(update_info)

    def finish_weight_update(self) -> None:
        """Ends an update. The user must then reset the prefix cache, as after ``reload_weights``."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_updates.finish()

    def abort_weight_update(self) -> None:
        """Ends an update after an error of another worker; does nothing if there is none."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_updates.abort()

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Writes this rank's part of the weights to files, which ``load_format=sharded_state`` reads.

        vLLM names them by the rank of tensor parallelism alone, so pipeline stages would overwrite each other's.
        """
        if self.parallel_config.pipeline_parallel_size > 1:
            raise CheckpointError(
                "pipeline stages cannot be saved as sharded state: save it from an engine with pipeline_parallel_size=1"
            )
        self.weight_updates.check_idle()
        self.model_runner.sleep.check_weights()
        with self.model_runner.step_guard.lock, self.model_runner.adapters.set_aside():
            save_sharded_state(self.model_runner.model, path, pattern, max_size)

    # ---- LoRA adapters, between two steps ----

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter unless it is loaded; raises ValueError, and changes nothing, if it cannot be served."""
        with self.model_runner.changing_adapters() as adapters:
            return adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        with self.model_runner.changing_adapters() as adapters:
            return adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        with self.model_runner.changing_adapters() as adapters:
            return adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        return self.model_runner.adapters.list()

    # ---- Sleep, between two steps ----

    def check_sleep(self, level: int = 1) -> None:
        """Raises ValueError if this engine cannot sleep at a level, or not now."""
        self.weight_updates.check_idle()
        self.model_runner.sleep.check(level)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of weights and caches. Level 1 keeps weights on the host; after level 2 they must be loaded
        again.

        Raises ValueError, and frees nothing, if this engine cannot sleep. Requests that come before ``wake_up`` end
        with an error.
        """
        self.check_sleep(level)
        memory_info = self.model_runner.device_ops.memory_info
        before = memory_info().free
        self.model_runner.sleep.begin(level)
        freed = max(0, memory_info().free - before)
        logger.info("Sleep at level %d freed %.2f GiB of device memory.", level, freed / GiB_bytes)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory of tags back, "weights", "kv_cache", or of all. Caches come back empty, and after level 2
        so do weights."""
        self.weight_updates.check_idle()
        self.model_runner.sleep.end(tags)

    def discard(self, tags: Collection[str]) -> None:
        """Frees the memory of ``tags``, which must be the KV cache alone, and keeps weights where they are."""
        self.weight_updates.check_idle()
        self.model_runner.sleep.discard(tags)

    def sleeping_tags(self) -> list[str]:
        """Tags of the memory that sleeps; empty if the engine is awake."""
        return sorted(self.model_runner.sleep.tags)

    # ---- Everything else the engine may ask ----

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def update_config(self, overrides: dict[str, dict[str, Any]]) -> None:
        """Changes fields of ``load_config``, which a later ``reload_weights`` uses."""
        self.model_runner.update_config(overrides)
        self.load_config = self.vllm_config.load_config

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads other weights in place. The user must then reset the prefix cache, which holds keys of the old
        weights."""
        self.weight_updates.check_idle()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(*args, **kwargs)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Sets the model length that the engine has fitted to the free memory."""
        self.model_runner.update_max_model_len(max_model_len)
        self.model_config.max_model_len = max_model_len

    def reset_encoder_cache(self) -> None:
        """Forgets all encoder outputs, for instance after new weights."""
        self.model_runner.reset_encoder_cache()

    def synchronize_device(self) -> None:
        """Waits for the device; some releases of vLLM call it when the engine is paused."""
        self.model_runner.device_ops.synchronize()

    def execute_dummy_batch(self) -> None:
        """Joins a step of other replicas, which this one shares experts with, while it has no tokens itself."""
        self.model_runner.execute_dummy_batch()

    # ---- Profiling, by vLLM's own wrappers ----

    def make_profiler(self) -> WorkerProfiler | None:
        """Makes the profiler that ``profiler_config`` names; None if this device does not have it."""
        config = self.vllm_config.profiler_config
        if config.profiler != "torch":
            return None
        name = f"{self.vllm_config.instance_id}-rank-{self.rank}"
        return TorchProfilerWrapper(config, name, self.local_rank, list(self.profiler_activities))

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Starts or stops the profiler; raises RuntimeError if there is none.

        Later releases of vLLM name the trace's file by ``profile_prefix``, and pass the others to the profiler.
        """
        profiler: Any = self._profiler or self.make_profiler()
        self._profiler = profiler
        if profiler is None:
            raise RuntimeError("Profiling is not enabled: set --profiler-config, for example its profiler to torch")
        if not is_start:
            profiler.stop()
            return
        if profile_prefix:
            profiler.set_output_name(f"{profile_prefix}-rank-{self.rank}")
        if profiler_kwargs:
            profiler.set_profiler_kwargs(profiler_kwargs)
        bounds = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        profiler.start(**{name: value for name, value in bounds.items() if value is not None})

    def shutdown(self) -> None:
        """Writes a profile that still runs, ends a weight update, transfers of a KV connector, and the background
        compilation of sizes."""
        if self.model_runner is not None:
            self.model_runner.background_compiler.stop()
        if self._connector is not None:
            self._connector.shutdown()
        if hasattr(self, "weight_updates"):  # Loading may have failed.
            self.weight_updates.shutdown()
        leave_groups(self)
        if self._profiler is not None:
            self._profiler.shutdown()
