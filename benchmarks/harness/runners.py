"""A runner that is fed step by step, by a scheduler or by hand, and timed.

``Side`` is a runner and its host time. ``Lane`` feeds it: from vLLM's scheduler, from ours, or from anything that has
``schedule`` and ``update_from_output``, such as a batch of chosen lengths (``batch.py``). No checkpoint is loaded: the
model's layers are names with a KV-cache spec, as many as Llama-3-8B has.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import enable_envs_cache
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.hashing import sha256
from vllm.utils.network_utils import get_distributed_init_method, get_open_port
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.harness.fake_device import CLOCK_NS, VOCAB_SIZE, FakeDevice, FakeDeviceRunner
from benchmarks.harness.models import BUNDLED_MODEL
from benchmarks.harness.releases import new_request, one_cache
from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.step.trace import RequestTrace, watch_steps
from model_runner_base.vllm_compat.types.kv_connector import make_connector

MAX_NUM_SEQS = 1024
MAX_NUM_TOKENS = 4096
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE // 2 + 1
"""Twice the blocks of ``MAX_NUM_SEQS`` requests of a quarter of the longest."""
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(32)]
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
"""Spec with the smallest shapes, since no layer runs."""


class Layer(AttentionLayerBase):
    """Attention layer with no more than the runners ask of one."""

    num_heads = 1

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self._backend = backend
        self.kv_cache: list[torch.Tensor] = []
        cache_format = CacheFormat(SPEC.num_kv_heads, SPEC.head_size)
        self.impl: Any = SimpleNamespace(num_heads=self.num_heads, cache_format=cache_format)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        return SPEC


def init_process() -> None:
    """Sets the process up as a worker does: one rank, one thread for tensor code so that thread time is all of it.

    vLLM's engine and scheduler serve its first model runner, unless a config asks for the second
    (host/second_runner.py).
    """
    torch.set_num_threads(1)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    init_none_hash(sha256)
    enable_envs_cache()
    init_groups()


def init_groups() -> None:
    """Makes the groups of one rank, unless they exist; newer engine cores end them at shutdown."""
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def make_config(is_async: bool, max_model_len: int = MAX_MODEL_LEN, **options: Any) -> VllmConfig:
    """Config of the bundled model, with other lengths."""
    defaults = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_TOKENS, "block_size": BLOCK_SIZE}
    return EngineArgs(
        str(BUNDLED_MODEL),
        skip_tokenizer_init=True,
        hf_overrides={"max_position_embeddings": max_model_len, "vocab_size": VOCAB_SIZE},
        max_model_len=max_model_len,
        async_scheduling=is_async,
        disable_cascade_attn=True,
        **(defaults | options),
    ).create_engine_config()


def layered_config(is_async: bool, backend: type[AttentionBackend], **options: Any) -> VllmConfig:
    """Config whose model has ``LAYERS``."""
    config = make_config(is_async, **options)
    config.compilation_config.static_forward_context.update({name: Layer(backend) for name in LAYERS})
    return config


def cache_config(num_blocks: int) -> KVCacheConfig:
    return one_cache(LAYERS, SPEC, num_blocks)


def make_scheduler(
    scheduler_cls: Callable[..., Scheduler], config: VllmConfig, num_blocks: int, max_num_tokens: int
) -> Scheduler:
    """A fresh scheduler, whose limits may be lower than the runner's."""
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler = scheduler_cls(
        vllm_config=config,
        kv_cache_config=cache_config(num_blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )
    scheduler.max_num_scheduled_tokens = max_num_tokens
    return scheduler


def make_request(req_id: str, prompt: list[int], max_tokens: int, **params: Any) -> Request:
    """A request, greedy unless ``params`` say otherwise."""
    options = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | params
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return new_request(req_id, prompt, SamplingParams(**options), block_hasher=hasher)


def length_of(index: int) -> int:
    """Lengths from 50 to 1500 in no order: blocks and attention tiles are entered at staggered times."""
    return 50 + index * 997 % 1451


def make_runner(config: VllmConfig, runner_cls: type[FakeDeviceRunner] = FakeDeviceRunner) -> FakeDeviceRunner:
    """Our runner on the device that takes no time, without caches yet."""
    runner = runner_cls(config, torch.device("cpu"))
    runner.load_model()
    return runner


Watch = Callable[[Any], AbstractContextManager[list[Any]]]


class Side:
    """A runner or worker, its outputs still to be read, and its host time."""

    def __init__(self, runner: Any, device: FakeDevice, watch: Watch = watch_steps) -> None:
        self.runner = runner
        self.device = device
        self.watch = watch
        """Recorder of live steps, as ``watch_steps``."""
        self.step_ns = 0
        """Nanoseconds of host time since it was last set to 0."""
        self._unread: deque[ModelRunnerOutput | AsyncModelRunnerOutput] = deque()

    @classmethod
    def ours(cls, config: VllmConfig, runner_cls: type[FakeDeviceRunner] = FakeDeviceRunner) -> "Side":
        """Our runner on the device that takes no time."""
        with set_current_vllm_config(config):
            runner = make_runner(config, runner_cls)
            runner.connector = make_connector(config, cache_config(NUM_BLOCKS))
            runner.initialize_kv_cache(cache_config(NUM_BLOCKS))
        return cls(runner, runner.fake_device)

    def launch(self, scheduler_output: SchedulerOutput) -> None:
        before, start = self.device.taken_ns, time.thread_time_ns()
        output = self.runner.execute_model(scheduler_output)
        if output is None:
            output = self.runner.sample_tokens(None)
        self._unread.append(output)
        self.step_ns += time.thread_time_ns() - start - CLOCK_NS - (self.device.taken_ns - before)

    def read(self) -> ModelRunnerOutput:
        """Output of the oldest step."""
        start = time.thread_time_ns()
        output = self._unread.popleft()
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        self.step_ns += time.thread_time_ns() - start - CLOCK_NS
        return output


Handed = Mapping[str, RequestTrace] | None
"""Traces by request; None if the step was not watched."""


class Results(NamedTuple):
    """Results of a step of one lane."""

    scheduler_output: SchedulerOutput
    output: ModelRunnerOutput
    handed: Handed


class Lane:
    """One runner with what feeds it: a scheduler, or steps made by hand. ``name`` tells its requests from others'."""

    def __init__(self, side: Side, scheduler: Any, is_async: bool = False, name: str = "") -> None:
        self.side = side
        self.scheduler = scheduler
        self.schedule_ns = self.update_ns = 0
        """Nanoseconds of the scheduler since they were last set to 0; the runner's are its side's."""
        self._name = name
        self.num_requests = 0
        """Number of requests that were added."""
        self._in_flight: deque[tuple[SchedulerOutput, Handed]] = deque()
        self._max_in_flight = 2 if is_async else 1
        self._watching = ExitStack()
        self._watched: list[Any] | None = None
        """Traces of the live steps, while they are watched."""

    def add(self, length: int, max_tokens: int, **params: Any) -> None:
        """Adds a request with a prompt of its own."""
        number = self.num_requests
        self.num_requests += 1
        prompt = np.random.default_rng(number).integers(VOCAB_SIZE, size=length).tolist()
        self.scheduler.add_request(make_request(f"{self._name}.{number}", prompt, max_tokens, **params))

    def step(self) -> tuple[SchedulerOutput, Results | None]:
        """Launches a step, and reads the one before it, or this one if scheduling is synchronous."""
        start = time.thread_time_ns()
        scheduler_output = self.scheduler.schedule()
        self.schedule_ns += time.thread_time_ns() - start - CLOCK_NS
        self.side.launch(scheduler_output)
        output = self.side.read() if len(self._in_flight) + 1 == self._max_in_flight else None
        is_told = self._watched is not None and scheduler_output.total_num_scheduled_tokens
        handed = self._watched.pop().requests if is_told else None  # type: ignore[union-attr]
        self._in_flight.append((scheduler_output, handed))
        return scheduler_output, None if output is None else self._finish(output)

    def drain(self) -> list[Results]:
        """Reads what is in flight."""
        return [self._finish(self.side.read()) for _ in range(len(self._in_flight))]

    def _finish(self, output: ModelRunnerOutput) -> Results:
        scheduler_output, handed = self._in_flight.popleft()
        start = time.thread_time_ns()
        self.scheduler.update_from_output(scheduler_output, output)
        self.update_ns += time.thread_time_ns() - start - CLOCK_NS
        return Results(scheduler_output, output, handed)

    def watch(self) -> None:
        """Records from now on what live steps hand over."""
        self._watched = self._watching.enter_context(self.side.watch(self.side.runner))

    def replay(self) -> None:
        """Stops recording; from now on the device replays its results."""
        self._stop_watching()
        self.side.device.replay()

    def close(self) -> None:
        """Ends all requests and lets the runner know; nothing is in flight after it."""
        self.drain()
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.step()
        self.drain()
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._watching.close()
        self._watched = None
