"""vLLM's own first GPUModelRunner on torch's CPU, as vLLM's CPUModelRunner has it, with everything that the host does.

The stand-ins for CUDA cost less than CUDA would: streams and events do nothing, copies to the device are copies in
host memory (buffers stay apart, as on a device with a memory of its own). CUDA graphs and torch.compile are off, so
their dispatch is not in the figures either. Attention metadata is made by vLLM's Triton backend's builder.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.harness.fake_device import FakeDevice, FakeModel
from benchmarks.harness.releases import find_slots_by, penalised_tokens
from model_runner_base.step.trace import RequestTrace, SampledPlace, SeenKeys

StockBackend = TritonAttentionBackend


class _Stream:
    """Stand-in for a stream and for an event: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, stream: "_Stream | None" = None) -> None:
        pass

    synchronize = wait_stream = record


class _Generator(torch.Generator):
    """Generator that can be turned back as CUDA's can, which is done where a chunk of a prompt yields no token."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def stand_in_for_cuda() -> None:
    """Replaces CUDA's streams and events, and torch's generators, for the rest of the process; ours uses none."""
    stream = _Stream()
    torch.Generator = _Generator  # type: ignore[misc]
    torch.Event = torch.cuda.Event = torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.set_stream = lambda _: None  # type: ignore[assignment]


class FakeSampler(Sampler):
    """Sampler that counts as device work, but for what it does to Python lists.

    The metadata that it is given is the host's, and so is the tensor that it makes of all output tokens for penalties.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._metadata: SamplingMetadata
        self._sample = device.wrap(self._run)

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:  # type: ignore[override]
        if not sampling_metadata.no_penalties:
            penalised_tokens(sampling_metadata.output_token_ids, logits.shape[1], logits.device)
        self._metadata = sampling_metadata
        return self._sample(logits)

    def _run(self, logits: torch.Tensor) -> SamplerOutput:
        return super().forward(logits, self._metadata)


class StockRunner(GPUModelRunner):
    """vLLM's runner without the parts that talk to CUDA."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        stand_in_for_cuda()
        super().__init__(vllm_config, torch.device("cpu"))
        self.fake_device = FakeDevice()
        find_slots_by(self.fake_device.wrap)
        self.sampler = FakeSampler(self.fake_device)
        self.model = WatchedModel(self)

    def _init_device_properties(self) -> None:
        pass

    def _sync_device(self) -> None:
        pass

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], **_: object
    ) -> dict[str, torch.Tensor]:
        """No tensors, since no layer runs."""
        return {}


class WatchedModel(FakeModel):
    """The model of the runner, which tells what live steps hand over."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.fake_device)
        self.steps: list[StockTrace] | None = None
        """Traces of steps, which grow while steps are watched; None otherwise."""
        self._runner = runner
        self._token_ids: list[int]
        self._positions: list[int]
        self._metadata: dict[str, Any]

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.steps is not None:
            context: Any = get_forward_context()
            self._token_ids, self._positions = token_ids.tolist(), positions.tolist()
            self._metadata = context.attn_metadata
        return super()._run(token_ids, positions)

    def _run_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.steps is not None:
            self.steps.append(StockTrace(self._by_request(hidden_states[:, 1].int().tolist())))
        return super()._run_head(hidden_states)

    def _by_request(self, sampled_from: list[int]) -> dict[str, RequestTrace]:
        layer, metadata = next(iter(self._metadata.items()))
        slots, block_size = metadata.slot_mapping.numpy().copy(), self._runner.cache_config.block_size
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        requests = {}
        for index, req_id in enumerate(self._runner.input_batch.req_ids):
            tokens = slice(starts[index], starts[index + 1])
            keys = np.arange(seq_lens[index])
            in_cache = metadata.block_table[index].numpy()[keys // block_size] * block_size + keys % block_size
            requests[req_id] = RequestTrace(
                token_ids=self._token_ids[tokens],
                positions=self._positions[tokens],
                sampled=SampledPlace(sampled_from[index] - tokens.start, -1, seq_lens[index]),
                slots={layer: slots[tokens]},
                seen={layer: [SeenKeys(keys[: at + 1], in_cache[: at + 1]) for at in self._positions[tokens]]},
            )
        return requests


class StockTrace(NamedTuple):
    """Trace of a step of vLLM's runner, as its first layer finds it; it has no rows."""

    requests: dict[str, RequestTrace]


@contextmanager
def watch_stock(runner: Any) -> Iterator[list[StockTrace]]:
    """``watch_steps`` of vLLM's runner."""
    steps = runner.model.steps = []
    try:
        yield steps
    finally:
        runner.model.steps = None
