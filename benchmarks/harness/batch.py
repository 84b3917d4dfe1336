"""Steps of chosen lengths, without a scheduler or a prefill before them, on the workers of ``workers.py``."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.forward_context import override_forward_context

from benchmarks.harness.fake_device import FakeDevice
from benchmarks.harness.report import take_turns
from benchmarks.harness.runners import Lane, Side
from model_runner_base import ModelRunnerWorker, StepSize
from model_runner_base.step.schedule import SchedulerOutput
from model_runner_base.testing.scheduler_outputs import Continued, HandMadeStep


class Batch:
    """Requests of given lengths, in place of a scheduler; their blocks lie anywhere."""

    def __init__(self, worker: ModelRunnerWorker, lengths: Sequence[int], headroom: int = 0) -> None:
        """Requests that decode. ``headroom``: tokens that each request may grow by."""
        self.worker = worker
        self.lengths = np.array(lengths)
        self.req_ids = [f"{id(self)}-{index}" for index in range(len(lengths))]
        self._is_admitted = False
        tables = worker.model_runner.parts.block_tables  # type: ignore[attr-defined]
        self._sizes = [table.block_size * table.blocks_per_kv_block for table in tables]
        available = worker.cache_config.num_gpu_blocks - 1  # type: ignore[operator]
        ids = np.random.default_rng(0).permutation(available) + 1
        self._blocks: list[list[list[int]]] = [[] for _ in lengths]
        """Blocks of each request, in each group."""
        for size in self._sizes:
            # Groups share blocks of the pool: what is read there is no matter.
            num_blocks = -(-(self.lengths + headroom) // size)
            of_group = np.split(np.resize(ids, num_blocks.sum()), np.cumsum(num_blocks)[:-1])
            for blocks, more in zip(self._blocks, of_group, strict=True):
                blocks.append(more.tolist())

    def schedule(self) -> SchedulerOutput:
        """The step that admits the requests, and then steps that decode one more token of each."""
        if self._is_admitted:
            return self._next()
        self._is_admitted = True
        return self._first()

    def update_from_output(self, scheduler_output: SchedulerOutput, output: Any) -> None:
        """Ignores the tokens."""

    def leave(self) -> None:
        self.worker.execute_model(HandMadeStep().scheduler_output({}, set(self.req_ids), set(), len(self._sizes)))

    def _first(self) -> SchedulerOutput:
        """The step that admits the requests. All tokens but the last are in the cache already."""
        params = SamplingParams(temperature=0, max_tokens=1 << 20)
        step = HandMadeStep()
        for req_id, length, blocks in zip(self.req_ids, self.lengths.tolist(), self._blocks, strict=True):
            used = [ids[: -(-length // size)] for ids, size in zip(blocks, self._sizes, strict=True)]
            step.add_new(req_id, [5] * length, params, used, length - 1)
        return step.scheduler_output(dict.fromkeys(self.req_ids, 1), set(), set(), num_groups=len(self._sizes))

    def _next(self) -> SchedulerOutput:
        """The step that decodes one more token of each request; a request that enters a new block gets that block."""
        self.lengths += 1
        step = HandMadeStep()
        for req_id, computed, blocks in zip(self.req_ids, (self.lengths - 1).tolist(), self._blocks, strict=True):
            of_groups = zip(blocks, self._sizes, strict=True)
            new_blocks = tuple([ids[computed // size]] if computed % size == 0 else [] for ids, size in of_groups)
            given = new_blocks if any(new_blocks) else None
            step.continued.append(Continued(req_id, False, None, given, computed, num_output_tokens=1))
        return step.scheduler_output(dict.fromkeys(self.req_ids, 1), set(), set(), num_groups=len(self._sizes))


class Graph(NamedTuple):
    """The model's graph at one size."""

    size: StepSize
    run: Callable[[], Any]


def model_graph(batch: Batch) -> Graph:
    """The model's graph of a batch's first step; its requests are gone when this returns."""
    runner, graphs = batch.worker.model_runner, list[Graph]()
    parts = runner.parts
    forward = parts.graph.forward

    def record(size: StepSize, packed: torch.Tensor, entries: torch.Tensor, *others: torch.Tensor) -> Any:
        graphs.append(_graph(runner, size, lambda: [packed, entries, *parts.rows.tensors, *parts.components.tensors]))
        return forward(size, packed, entries, *others)

    parts.bind_kv_caches()  # Tracing a new size reads the caches of now.
    parts.graph.forward = record
    try:
        Lane(Side(batch.worker, FakeDevice()), batch).step()
    finally:
        parts.graph.forward = forward
    batch.leave()
    return graphs[0]


def _graph(runner: Any, size: StepSize, tensors: Callable[[], Sequence[torch.Tensor]]) -> Graph:
    """A graph that runs to its end on openxla."""
    import torch_xla.core.xla_model as xm

    def run() -> None:
        with torch.no_grad(), override_forward_context(runner.parts.forward_context):
            runner.parts.graph.forward(size, *tensors())
        xm.wait_device_ops()

    return Graph(size, run)


def least(graphs: Mapping[str, Graph], repeats: int) -> dict[str, float]:
    """Least milliseconds of each graph, by turns, since other work on the machine only adds."""
    times = take_turns({name: graph.run for name, graph in graphs.items()}, repeats)
    return {name: min(each) for name, each in times.items()}


def host_time(worker: ModelRunnerWorker, lengths: Sequence[int], num_steps: int = 30) -> float:
    """Median microseconds of this thread in a step of steady decode, from the scheduler's output to the tokens.

    All steps must stay within the KV tiles that ``lengths`` begin in.
    """
    batch = Batch(worker, lengths, num_steps + 1)
    side = Side(worker, worker.model_runner.graph_policy.fake_device)  # type: ignore[attr-defined]
    lane, times = Lane(side, batch), []
    for _ in range(1 + num_steps):
        side.step_ns = 0
        lane.step()
        times.append(side.step_ns)
    batch.leave()
    return statistics.median(times[3:]) / 1e3
