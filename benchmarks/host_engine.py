"""An engine core in small: both runners, each with a scheduler, which is vLLM's own or ours.

Nothing here loads a checkpoint: the model's layers are names with a KV-cache spec, of Llama-3-8B's number.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.fake_device import CLOCK_NS, VOCAB_SIZE, FakeDevice, FakeDeviceRunner
from benchmarks.models import BUNDLED_MODEL
from benchmarks.stock_runner import StockBackend, StockRunner, watch_stock
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.scheduling import make_scheduler as make_row_scheduler
from model_runner_base.step.trace import watch_steps

MAX_NUM_SEQS = 1024
MAX_NUM_TOKENS = 4096
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(32)]
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
"""Spec with the smallest shapes, since no layer runs."""


class Layer(AttentionLayerBase):
    """Attention layer with no more than the runners ask of one."""

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self._backend = backend
        self.kv_cache: list[torch.Tensor] = []

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        return SPEC


def init_process() -> None:
    """Sets the process up as a worker does: one rank, one thread for tensor code so that thread time is all of it."""
    torch.set_num_threads(1)
    init_none_hash(sha256)
    enable_envs_cache()
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    init_distributed_environment(1, 0, address, 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


def make_config(is_async: bool, backend: type[AttentionBackend], **options: Any) -> VllmConfig:
    config = EngineArgs(
        str(BUNDLED_MODEL),
        skip_tokenizer_init=True,
        hf_overrides={"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        block_size=BLOCK_SIZE,  # type: ignore[arg-type]
        async_scheduling=is_async,
        disable_cascade_attn=True,
        **options,
    ).create_engine_config()
    config.compilation_config.static_forward_context.update({name: Layer(backend) for name in LAYERS})
    return config


def cache_config(num_blocks: int) -> KVCacheConfig:
    size = num_blocks * SPEC.page_size_bytes
    return KVCacheConfig(num_blocks, [KVCacheTensor(size, LAYERS)], [KVCacheGroupSpec(LAYERS, SPEC)])


class Side:
    """One of the two runners, its outputs still to be read, and its host time."""

    def __init__(
        self,
        runner: Any,
        watch: Callable[[Any], AbstractContextManager[list[Any]]],
        scheduler_cls: Callable[..., Scheduler],
    ) -> None:
        self.runner = runner
        self.scheduler_cls = scheduler_cls
        """Maker of the runner's scheduler."""
        self.device: FakeDevice = runner.fake_device
        self.watch = watch
        """Recorder of live steps, as ``watch_steps``."""
        self.step_ns = 0
        """Nanoseconds of host time since it was last set to 0."""
        self._unread: deque[ModelRunnerOutput | AsyncModelRunnerOutput] = deque()

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


class Sides:
    """Sides of both runners, set up for one way of scheduling."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        # Twice the blocks of MAX_NUM_SEQS requests of a quarter of the longest.
        self.num_blocks = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE // 2 + 1
        stock_config = make_config(is_async, StockBackend)
        with set_current_vllm_config(stock_config):
            stock = StockRunner(stock_config)
            stock.initialize_kv_cache(cache_config(self.num_blocks))
        self.config = make_config(is_async, PagedAttentionBackend)
        with set_current_vllm_config(self.config):
            ours = FakeDeviceRunner(self.config, torch.device("cpu"))
            ours.load_model()
            ours.initialize_kv_cache(cache_config(self.num_blocks))
        self.stock = Side(stock, watch_stock, AsyncScheduler if is_async else Scheduler)
        self.ours = Side(ours, watch_steps, make_row_scheduler)

    def __iter__(self) -> Iterator[Side]:
        return iter((self.stock, self.ours))

    def make_scheduler(self, side: Side, num_blocks: int, max_num_tokens: int) -> Scheduler:
        """A fresh scheduler, whose limits may be lower than the runners'."""
        return make_scheduler(side.scheduler_cls, self.config, num_blocks, max_num_tokens)


def make_scheduler(
    scheduler_cls: Callable[..., Scheduler], config: VllmConfig, num_blocks: int, max_num_tokens: int
) -> Scheduler:
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
    return Request(req_id, prompt, SamplingParams(**options), None, None, block_hasher=hasher)
