"""Decode steps of chosen lengths without a scheduler or a prefill, on two workers that pad nothing and warm nothing up.

``HostWorker`` runs them on the fake device, so that what a step costs is the host's. ``ExactWorker`` compiles every
step at just the size it has.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from benchmarks.fake_device import FakeDevice
from benchmarks.models import BUNDLED_MODEL
from model_runner_base.graph_policy import BucketPolicy, GraphPolicy, GraphSize, StepFunction
from model_runner_base.loader import load_checkpoint
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.worker import ModelRunnerWorker
from neuron_runner.model_runner import NeuronModelRunner
from neuron_runner.worker import NeuronWorker

BLOCK_SIZE = 32


class ReplayPolicy(BucketPolicy):
    """Every wrapped function is a graph on the fake device. No padding, unless ``set_sizes`` is called."""

    def __init__(self) -> None:
        self.fake_device = FakeDevice()
        self.fake_device.replay()

    def wrap(self, function: StepFunction, state: list[torch.Tensor]) -> StepFunction:
        return self.fake_device.wrap(function)


class HostRunner(ModelRunnerBase):
    def _cache_device_properties(self) -> None:
        self.graph_policy = ReplayPolicy()

    def load_model(self) -> None:
        self.model = load_checkpoint(self.vllm_config)

    def capture_model(self) -> None:
        pass


class BareWorker(ModelRunnerWorker):
    def determine_available_memory(self) -> int:
        """Enough: the number of blocks is given."""
        return 1 << 40


class HostWorker(BareWorker):
    model_runner_cls = HostRunner

    def make_device(self) -> torch.device:
        return torch.device("cpu")


class ExactPolicy(GraphPolicy):
    """No sizes: a graph is compiled when a step first needs it."""

    def wrap(self, function: StepFunction, state: list[torch.Tensor]) -> StepFunction:
        from neuron_runner.compilation import CompiledFunction

        return CompiledFunction(function, state)


class ExactRunner(NeuronModelRunner):
    def _cache_device_properties(self) -> None:
        super()._cache_device_properties()
        self.graph_policy = ExactPolicy()

    def capture_model(self) -> None:
        pass


class ExactWorker(BareWorker, NeuronWorker):
    model_runner_cls = ExactRunner


@contextmanager
def worker(
    worker_cls: type[ModelRunnerWorker], cache_tokens: int, config: dict[str, Any], **options: Any
) -> Iterator[ModelRunnerWorker]:
    """A worker with random weights: the bundled model's config with changes, and a cache of so many tokens."""
    llm = LLM(
        str(BUNDLED_MODEL),
        load_format="dummy",
        skip_tokenizer_init=True,
        worker_cls=f"{worker_cls.__module__}.{worker_cls.__qualname__}",
        hf_overrides=config,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=cache_tokens // BLOCK_SIZE + 1,
        **options,
    )
    try:
        yield llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


class DecodeBatch:
    """Requests of given lengths that decode, as the scheduler would hand them out; their blocks lie anywhere."""

    def __init__(self, worker: ModelRunnerWorker, lengths: Sequence[int], headroom: int = 0) -> None:
        """``headroom``: tokens that they may grow by."""
        self.worker = worker
        self.lengths = np.array(lengths)
        self.req_ids = [f"{id(self)}-{index}" for index in range(len(lengths))]
        num_blocks = -(-(self.lengths + headroom) // BLOCK_SIZE)
        available = worker.cache_config.num_gpu_blocks - 1  # type: ignore[operator]
        blocks = np.random.default_rng(0).permutation(available)[: num_blocks.sum()] + 1
        self._blocks = [ids.tolist() for ids in np.split(blocks, np.cumsum(num_blocks)[:-1])]

    def first(self) -> SchedulerOutput:
        """The step that brings them in: all but the last token lies in the cache already."""
        params = SamplingParams(temperature=0, max_tokens=1 << 20)
        new = [
            NewRequestData(
                req_id, [5] * length, [], params, None, (blocks[: -(-length // BLOCK_SIZE)],), length - 1, None
            )
            for req_id, length, blocks in zip(self.req_ids, self.lengths.tolist(), self._blocks, strict=True)
        ]
        return self._output(new, CachedRequestData.make_empty())

    def next(self) -> SchedulerOutput:
        """One token further; who needs a block gets it."""
        self.lengths += 1
        computed = (self.lengths - 1).tolist()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(self.req_ids)
        for index in np.flatnonzero(self.lengths % BLOCK_SIZE == 1):
            new_blocks[index] = ([self._blocks[index][computed[index] // BLOCK_SIZE]],)
        outputs = [1] * len(self.req_ids)
        return self._output([], CachedRequestData(self.req_ids, set(), [], {}, new_blocks, computed, outputs))

    def _output(self, new: list[NewRequestData], cached: CachedRequestData) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(self.req_ids, 1)
        output.total_num_scheduled_tokens = len(self.req_ids)
        return output

    def leave(self) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self.req_ids)
        self.worker.execute_model(output)


def run(worker: ModelRunnerWorker, scheduled: SchedulerOutput) -> None:
    """One whole step."""
    worker.execute_model(scheduled)
    output = worker.sample_tokens(None)
    if isinstance(output, AsyncModelRunnerOutput):
        output.get_output()


def decode_graph(worker: ModelRunnerWorker, lengths: Sequence[int]) -> tuple[GraphSize, Callable[[], None]]:
    """A step's size, and what runs its model graph and waits for it."""
    import torch_xla.core.xla_model as xm

    runner = worker.model_runner
    forward, calls = runner._forward, []
    batch = DecodeBatch(worker, lengths)

    def record(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    runner._bind_kv_caches()  # Tracing a new size reads the caches of now.
    runner._forward = record
    try:
        run(worker, batch.first())
    finally:
        runner._forward = forward

    batch.leave()
    (size, packed, _), *_ = calls

    def again() -> None:
        with torch.no_grad():
            forward(size, packed, runner.last_tokens[0])
        xm.wait_device_ops()

    return size, again


def padded_graph(worker: ModelRunnerWorker, size: GraphSize) -> Callable[[], None]:
    """Runs the model graph of a size on nothing but padding, and waits for it."""
    import torch_xla.core.xla_model as xm

    def run_padding() -> None:
        with torch.no_grad():
            worker.model_runner._dummy_run(size)
        xm.wait_device_ops()

    return run_padding


def host_time(worker: ModelRunnerWorker, lengths: Sequence[int], num_steps: int = 30) -> float:
    """Median microseconds of this thread in a step of steady decode, from the scheduler's output to the tokens.

    ``lengths`` must leave room for the steps within their KV tiles.
    """
    batch = DecodeBatch(worker, lengths, num_steps + 1)
    device = worker.model_runner.graph_policy.fake_device  # type: ignore[attr-defined]
    run(worker, batch.first())
    times = []
    for _ in range(num_steps):
        scheduled = batch.next()
        taken, start = device.taken_ns, time.thread_time_ns()
        run(worker, scheduled)
        times.append(time.thread_time_ns() - start - (device.taken_ns - taken))
    batch.leave()
    return statistics.median(times[2:]) / 1e3
