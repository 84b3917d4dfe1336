"""gpu_runner on a CPU: the parts of torch.cuda that it uses are replaced, and kernels are plain torch.

Importing this module does it, for the whole process. What is worth replacing with care:

- A copy on a side stream waits until it is waited for: results that a later step has overwritten come out wrong.
- A captured graph makes its call again with the tensors of the capture, and with the attention metadata built then:
  inputs at other addresses, or numbers that a capture fixes, come out wrong.
- The attention backend is of vLLM's kind, with a metadata builder, under two names: one whose metadata are views of the
  step's tensors, and one whose builder has to be called for every step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar
from weakref import WeakSet

import psutil
import torch
from vllm.platforms.interface import Platform

from model_runner_base.platform import PagedPlatform


class KernelPlatform(PagedPlatform):
    """Stand-in for vLLM's CUDA platform: vLLM's graph settings stay as they are, and nothing here checks requests."""

    device_name = "cpu"
    device_type = "cpu"
    worker_cls = "cuda_stand_in.StandInWorker"
    dtypes = (torch.float32, torch.float16)
    default_block_size = 16
    attention = "cuda_stand_in.KernelBackend"
    stands_before_requests = False
    validate_request = Platform.validate_request

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return cls.attention

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

    @classmethod
    def can_update_inplace(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Turns pieces off, which need Inductor and a GPU: mixed steps are whole graphs, as far as the backend
        supports them."""
        from vllm.config import CUDAGraphMode

        super().check_and_update_config(vllm_config)
        if vllm_config.compilation_config.cudagraph_mode.requires_piecewise_compilation():
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL


class PlanningPlatform(KernelPlatform):
    attention = "cuda_stand_in.PlanningBackend"


import lora_stand_in  # noqa: E402
import recurrent_stand_in  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

import gpu_runner.cuda_graphs  # noqa: E402
import gpu_runner.device_ops  # noqa: E402
import gpu_runner.model_runner  # noqa: E402
from gpu_runner.worker import GPUWorker  # noqa: E402

# ---- Streams, events, memory ----


class Event:
    def __init__(self) -> None:
        self._waiting: list[Callable[[], Any]] = []

    def record(self) -> None:
        self._waiting, Stream.current.waiting = Stream.current.waiting, []

    def synchronize(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


class Stream:
    current: "Stream"

    def __init__(self, device: torch.device | None = None, is_late: bool = True) -> None:
        self.is_late = is_late
        self.waiting: list[Callable[[], Any]] = []

    def wait_stream(self, other: "Stream") -> None:
        pass


MAIN = Stream.current = Stream(is_late=False)
_copy = torch.Tensor.copy_


def late_copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if non_blocking and Stream.current.is_late:
        Stream.current.waiting.append(torch.inference_mode()(lambda: _copy(self, source)))
        return self
    return _copy(self, source, non_blocking)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


torch.Tensor.copy_ = late_copy  # type: ignore[assignment, method-assign]
torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[assignment, misc]
torch.cuda.stream = on_stream  # type: ignore[assignment, misc]
torch.cuda.current_stream = lambda device=None: Stream.current  # type: ignore[assignment, return-value]
torch.cuda.synchronize = torch.cuda.empty_cache = lambda device=None: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.reset_peak_memory_stats = lambda device=None: None
torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda device=None: 0
torch.cuda.mem_get_info = lambda device=None: (psutil.virtual_memory().available, psutil.virtual_memory().total)
gpu_runner.device_ops.pinned = lambda shape, dtype: torch.empty(shape, dtype=dtype)
gpu_runner.model_runner.graph_capture = nullcontext  # type: ignore[assignment]


# ---- Graphs ----


class RecordedGraph:
    """The call that was captured, made again at each replay."""

    current: "RecordedGraph | None" = None
    captured: ClassVar[list[Any]] = []
    """The size of each capture, in order."""
    _all: ClassVar[WeakSet["RecordedGraph"]] = WeakSet()

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        function(*args)
        self._function, self._args = function, args
        self.metadata: list[Any] = []
        self.is_replaying = False
        self.outputs = tuple(output.clone() for output in self._run())
        self.is_replaying = True
        RecordedGraph.captured.append(args[0])
        RecordedGraph._all.add(self)

    def replay(self) -> None:
        for other in RecordedGraph._all:  # All graphs' outputs lie in one pool.
            for output in other.outputs:
                output.fill_(float("nan") if output.is_floating_point() else -1)
        for output, result in zip(self.outputs, self._run(), strict=True):
            _copy(output, result)

    def _run(self) -> Any:
        RecordedGraph.current, self._next = self, iter(self.metadata.copy())
        try:
            return self._function(*self._args)
        finally:
            RecordedGraph.current = None

    def held(self, build: Callable[[], Any]) -> Any:
        """Result of ``build`` at the capture; the call itself writes the tensors in it anew."""
        if self.is_replaying:
            return next(self._next)
        self.metadata.append(build())
        return self.metadata[-1]


def capture(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[RecordedGraph, tuple[torch.Tensor, ...]]:
    graph = RecordedGraph(function, args)
    return graph, graph.outputs


gpu_runner.cuda_graphs.capture = capture  # type: ignore[assignment]


# ---- LoRA ----


def fixed(build: Callable[[], Any]) -> Any:
    """A number that a kernel is launched with: a graph has it from its capture."""
    graph = RecordedGraph.current
    return build() if graph is None else graph.held(build)


lora_stand_in.replace_kernels(fixed)
recurrent_stand_in.replace_kernels()


# ---- Attention ----


@dataclass
class KernelMetadata:
    query_start_loc: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int


class KernelBuilder(AttentionMetadataBuilder[KernelMetadata]):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KernelMetadata:
        common = common_attn_metadata

        def make() -> KernelMetadata:
            return KernelMetadata(
                common.query_start_loc,
                self._lengths(common),
                common.block_table_tensor,
                common.max_query_len,
                common.max_seq_len,
                common.num_actual_tokens,
            )

        graph = RecordedGraph.current
        return make() if graph is None else graph.held(make)

    def _lengths(self, common: CommonAttentionMetadata) -> torch.Tensor:
        return common.seq_lens


class PlanningBuilder(KernelBuilder):
    """Builder for graphs of decode alone, with batches in vLLM's order.

    The kernels go by lengths that each step's call writes into a buffer of the builder's.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        assert mode.mixed_mode() != CUDAGraphMode.FULL, "builders are made when the mode is resolved: they go by it"
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._is_plain = self.vllm_config.speculative_config is None
        self._buffer = torch.zeros(self.vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32)

    def _lengths(self, common: CommonAttentionMetadata) -> torch.Tensor:
        assert RecordedGraph.current is None, "a planning builder is called outside graphs"
        query_len = common.query_start_loc_cpu.diff()
        is_uniform = common.num_actual_tokens == common.num_reqs * common.max_query_len
        assert common.query_start_loc_cpu[-1] == common.num_actual_tokens or is_uniform
        assert len(common.slot_mapping) == common.num_actual_tokens
        on_host = getattr(common, "seq_lens_cpu_upper_bound", None)
        on_host = common.seq_lens_cpu if on_host is None else on_host
        assert on_host.equal(common.seq_lens) if self._is_plain else on_host.ge(common.seq_lens).all()
        assert query_len.equal(common.query_start_loc.diff())
        is_extended = (query_len > self.reorder_batch_threshold).int()
        regions = torch.where(on_host - query_len > 0, is_extended, 2)[query_len > 0]
        assert regions.diff().ge(0).all(), "decodes, extended requests, fresh prompts: that is the order"
        split_decodes_and_prefills(common, self.reorder_batch_threshold)  # vLLM 0.16 raises unless decodes come first.
        return _copy(self._buffer[: common.num_reqs], common.seq_lens)


def keys_and_values(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [blocks, block size, K, D] of a layer's cache, which is [blocks, 2, block size, K, D] where backends give
    its shape, and [blocks, K, block size, 2 * D] where vLLM does."""
    return cache.unbind(1) if cache.ndim == 5 else cache.transpose(1, 2).chunk(2, dim=-1)


class KernelImpl(AttentionImpl[KernelMetadata]):
    """Attention request by request, in float32 and plain torch."""

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        *_: Any,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert alibi_slopes is None and sinks is None
        self.group = num_heads // (num_kv_heads or num_heads)
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        keys, values = keys_and_values(kv_cache)
        used = slot_mapping >= 0
        block, offset = slot_mapping[used] // keys.shape[1], slot_mapping[used] % keys.shape[1]
        keys[block, offset] = key[: len(used)][used]
        values[block, offset] = value[: len(used)][used]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, meta: Any, output: Any = None, **_: Any
    ) -> torch.Tensor:
        output.fill_(float("nan"))
        if meta is None:
            return output.fill_(0)
        starts = meta.query_start_loc.tolist()
        requests = zip(pairwise(starts), meta.lengths.tolist(), meta.block_table, strict=True)
        for (start, stop), length, blocks in requests:
            assert stop - start <= meta.max_query_len and (stop == start or length <= meta.max_seq_len)
            if stop > start:
                output[start:stop] = self._attend(query[start:stop], kv_cache, blocks, length)
        return output

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        in_use = (x[blocks[: -(-length // x.shape[1])]] for x in keys_and_values(kv_cache))
        keys, values = (x.flatten(0, 1)[:length].repeat_interleave(self.group, 1) for x in in_use)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        distance = torch.arange(length - len(query), length).unsqueeze(1) - torch.arange(length)
        visible = (distance >= 0) & (distance < (self.sliding_window or length))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


class KernelBackend(AttentionBackend):
    metadata_are_views = True
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[KernelImpl]:
        return KernelImpl

    @staticmethod
    def get_builder_cls() -> type[KernelBuilder]:
        return KernelBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Stride order with heads outside the block, as FlashInfer has them on some devices."""
        return (0, 1, 3, 2, 4)


class PlanningBackend(KernelBackend):
    metadata_are_views = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_builder_cls() -> type[KernelBuilder]:
        return PlanningBuilder


class StandInWorker(GPUWorker):
    def make_device(self) -> torch.device:
        init_workspace_manager(torch.device("cpu"))
        return torch.device("cpu")
