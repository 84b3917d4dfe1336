"""vLLM 0.16's own GPUModelRunner on torch's CPU, as vLLM's CPUModelRunner has it, with everything that the host does.

What stands in for CUDA costs less than CUDA would: streams and events do nothing, copies to the device are copies in
host memory (buffers stay apart, as on a device with a memory of its own). CUDA graphs and torch.compile are off, so
their dispatch is not in the figures either. Attention metadata is made by vLLM's Triton backend's builder.
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import _convert_to_tensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.fake_device import FakeDevice, FakeModel

StockBackend = TritonAttentionBackend


class _Stream:
    """Also the event: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self) -> None:
        pass

    synchronize = record

    def wait_stream(self, other: "_Stream") -> None:
        pass


class _Generator(torch.Generator):
    """CUDA's can be turned back, which is done where a chunk of a prompt yields no token."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def stand_in_for_cuda() -> None:
    """For the rest of the process; our runner uses none of it."""
    stream = _Stream()
    torch.Generator = _Generator  # type: ignore[misc]
    torch.Event = torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]


class FakeSampler(Sampler):
    """The sampler as device work, but for what it does to Python lists.

    The metadata that it is given is the host's, and so is the tensor that it makes of all output tokens for penalties.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._metadata: SamplingMetadata
        self._sample = device.wrap(self._run)

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:  # type: ignore[override]
        if not sampling_metadata.no_penalties:
            _convert_to_tensors(sampling_metadata.output_token_ids, logits.shape[1], logits.device)
        self._metadata = sampling_metadata
        return self._sample(logits)

    def _run(self, logits: torch.Tensor) -> SamplerOutput:
        return super().forward(logits, self._metadata)


class StockRunner(GPUModelRunner):
    """Less what talks to CUDA."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        stand_in_for_cuda()
        super().__init__(vllm_config, torch.device("cpu"))
        self.fake_device = FakeDevice()
        self.sampler = FakeSampler(self.fake_device)
        self.model = FakeModel(self.fake_device)
        self.model.look = self._look

    def _init_device_properties(self) -> None:
        pass

    def _sync_device(self) -> None:
        pass

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> dict[str, torch.Tensor]:
        """None that a layer would see: there is one for ``_look``, a value a slot."""
        self.cached = torch.zeros(kv_cache_config.num_blocks, self.cache_config.block_size)
        return {}

    def _look(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cache slots [T] and sequence lengths [R] of the running step, as a layer finds them."""
        context: Any = get_forward_context()
        metadata = next(iter(context.attn_metadata.values()))
        assert metadata.slot_mapping is next(iter(context.slot_mapping.values()))
        seen = {"slots": metadata.slot_mapping.clone(), "seq_lens": metadata.seq_lens.clone()}
        if self.fake_device.attends:
            self.cached.view(-1)[metadata.slot_mapping] = values[:, 0]
            means = []
            query_lens = metadata.query_start_loc.diff().tolist()
            for blocks, seq_len, query_len in zip(
                metadata.block_table, metadata.seq_lens.tolist(), query_lens, strict=False
            ):
                request = self.cached[blocks].view(-1)[:seq_len]
                means.append((request.cumsum(0) / torch.arange(1, seq_len + 1))[-query_len:])
            seen["attended"] = torch.cat(means)
        return seen
