"""Steps of chosen lengths without a scheduler or a prefill before them, on workers that warm nothing up.

``HostWorker`` runs them on the fake device, so that what a step costs is the host's. ``LazyWorker`` compiles one of
the platform's sizes when a step first needs it; ``ExactWorker`` compiles every step at exactly its own size.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.outputs import AsyncModelRunnerOutput

from benchmarks.fake_device import FakeDevice
from benchmarks.graphs import Graph, recorded
from benchmarks.models import BUNDLED_MODEL
from model_runner_base import BucketPolicy, GraphPolicy, ModelRunnerBase, ModelRunnerWorker, StepSize, load_checkpoint
from model_runner_base.graphs.policy import StepFunction
from model_runner_base.testing.scheduler_outputs import Continued, HandMadeStep
from model_runner_base.vllm_compat.types.schedule import SchedulerOutput
from neuron_runner.model_runner import NeuronModelRunner
from neuron_runner.worker import NeuronWorker

BLOCK_SIZE = 32


class ReplayPolicy(BucketPolicy):
    """Graph policy whose wrapped functions are graphs on the fake device. Pads only once ``set_sizes`` is called."""

    def __init__(self) -> None:
        self.fake_device = FakeDevice()
        self.fake_device.replay()

    def dispatch(self, need: StepSize) -> StepSize:
        return super().dispatch(need) if self.sizes else need

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
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
        """More than enough memory, since the number of blocks is given."""
        return 1 << 40


class HostWorker(BareWorker):
    model_runner_cls = HostRunner

    def make_device(self) -> torch.device:
        return torch.device("cpu")


class ExactPolicy(GraphPolicy):
    """Graph policy without sizes: a graph is compiled when a step first needs it."""

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        from neuron_runner.compilation import CompiledFunction

        return CompiledFunction(function, state)


class LazyRunner(NeuronModelRunner):
    def capture_model(self) -> None:
        pass


class LazyWorker(BareWorker, NeuronWorker):
    model_runner_cls = LazyRunner


class ExactRunner(LazyRunner):
    def _cache_device_properties(self) -> None:
        super()._cache_device_properties()
        self.graph_policy = ExactPolicy()


class ExactWorker(LazyWorker):
    model_runner_cls = ExactRunner


@contextmanager
def worker(
    worker_cls: type[ModelRunnerWorker], cache_tokens: int, config: dict[str, Any], **options: Any
) -> Iterator[ModelRunnerWorker]:
    """A worker with random weights: the bundled model's config with changes, and a cache of ``cache_tokens`` tokens."""
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


class Batch:
    """Requests of given lengths, as the scheduler would hand them out; their blocks lie anywhere."""

    def __init__(
        self, worker: ModelRunnerWorker, lengths: Sequence[int], headroom: int = 0, num_prompts: int = 0
    ) -> None:
        """Requests that decode, but for the last ``num_prompts``, of which nothing is computed yet.

        ``headroom``: tokens that each request may grow by.
        """
        self.worker = worker
        self.lengths = np.array(lengths)
        self.req_ids = [f"{id(self)}-{index}" for index in range(len(lengths))]
        self._num_decodes = len(lengths) - num_prompts
        num_blocks = -(-(self.lengths + headroom) // BLOCK_SIZE)
        available = worker.cache_config.num_gpu_blocks - 1  # type: ignore[operator]
        blocks = np.random.default_rng(0).permutation(available)[: num_blocks.sum()] + 1
        self._blocks = [ids.tolist() for ids in np.split(blocks, np.cumsum(num_blocks)[:-1])]

    def first(self) -> SchedulerOutput:
        """The step that admits the requests. Those that decode have all tokens but the last in the cache already."""
        params = SamplingParams(temperature=0, max_tokens=1 << 20)
        step, num_tokens = HandMadeStep(), {}
        for index, (req_id, length) in enumerate(zip(self.req_ids, self.lengths.tolist(), strict=True)):
            num_tokens[req_id] = 1 if index < self._num_decodes else length
            blocks = self._blocks[index][: -(-length // BLOCK_SIZE)]
            step.add_new(req_id, [5] * length, params, [blocks], length - num_tokens[req_id])
        return step.scheduler_output(num_tokens, set(), set(), num_groups=1)

    def next(self) -> SchedulerOutput:
        """The step that decodes one more token of each request; a request that enters a new block gets that block."""
        self.lengths += 1
        step = HandMadeStep()
        for req_id, computed, blocks in zip(self.req_ids, (self.lengths - 1).tolist(), self._blocks, strict=True):
            new_blocks = ([blocks[computed // BLOCK_SIZE]],) if computed % BLOCK_SIZE == 0 else None
            step.continued.append(Continued(req_id, False, None, new_blocks, computed, num_output_tokens=1))
        return step.scheduler_output(dict.fromkeys(self.req_ids, 1), set(), set(), num_groups=1)

    def leave(self) -> None:
        self.worker.execute_model(HandMadeStep().scheduler_output({}, set(self.req_ids), set(), num_groups=1))


def run(worker: ModelRunnerWorker, scheduled: SchedulerOutput) -> None:
    """Runs one whole step."""
    worker.execute_model(scheduled)
    output = worker.sample_tokens(None)
    if isinstance(output, AsyncModelRunnerOutput):
        output.get_output()


def model_graph(batch: Batch) -> Graph:
    """The model's graph of a batch's first step; its requests are gone when this returns."""
    with recorded(batch.worker.model_runner) as graphs:
        run(batch.worker, batch.first())
    batch.leave()
    return waited(graphs[0])


def waited(graph: Graph) -> Graph:
    """The graph, with a wait until it is done, on openxla."""
    import torch_xla.core.xla_model as xm

    def run_to_end() -> None:
        graph.run()
        xm.wait_device_ops()

    return Graph(graph.size, run_to_end)


def host_time(worker: ModelRunnerWorker, lengths: Sequence[int], num_steps: int = 30) -> float:
    """Median microseconds of this thread in a step of steady decode, from the scheduler's output to the tokens.

    All steps must stay within the KV tiles that ``lengths`` begin in.
    """
    batch = Batch(worker, lengths, num_steps + 1)
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
