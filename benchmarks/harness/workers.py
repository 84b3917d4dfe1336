"""Workers that warm nothing up, with random weights, for steps of chosen lengths (``batch.py``).

``HostWorker`` runs steps on the fake device, so that what a step costs is the host's. ``EagerWorker`` runs them as
plain torch on the CPU. ``ExactWorker`` compiles every step on openxla at exactly its own size.
"""

import gc
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from benchmarks.harness.fake_device import FakeDevice
from benchmarks.harness.models import BUNDLED_MODEL
from model_runner_base import BucketPolicy, GraphPolicy, ModelRunnerBase, ModelRunnerWorker, StepSize, load_checkpoint
from model_runner_base.step.graph_policy import StepFunction
from model_runner_base.step.sizes import StepKind
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


class EagerRunner(HostRunner):
    def _cache_device_properties(self) -> None:
        self.graph_policy = GraphPolicy()


class EagerWorker(HostWorker):
    model_runner_cls = EagerRunner


class ExactPolicy(GraphPolicy):
    """Graph policy without sizes: a graph is compiled when a step first needs it."""

    kind: StepKind | None = None
    """Kind of step to choose where a step may run in several ways."""

    def choose(self, needs: Sequence[StepSize]) -> StepSize:
        return next((need for need in needs if need.kind == self.kind), needs[0])

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
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
    worker_cls: type[ModelRunnerWorker],
    cache_tokens: int,
    config: dict[str, Any],
    block_size: int = BLOCK_SIZE,
    model: Any = BUNDLED_MODEL,
    **options: Any,
) -> Iterator[ModelRunnerWorker]:
    """A worker with random weights: the config of ``model`` with changes, and a cache of ``cache_tokens`` tokens."""
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        worker_cls=f"{worker_cls.__module__}.{worker_cls.__qualname__}",
        hf_overrides=config,
        block_size=block_size,
        num_gpu_blocks_override=cache_tokens // block_size + 1,
        **options,
    )
    try:
        yield llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
