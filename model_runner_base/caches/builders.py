"""Groups whose backends have kernels of their own, served through vLLM's metadata builders.

Tokens lie as step/request_layout.py says. Block tables lie on the device with a row for each request, and only rows
that changed are sent. Sequence lengths and cache slots are worked out on the device. So a step that repeats the last
one sends only the rows of requests that entered a block.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf

from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.spans import NO_SPANS
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.packing import PackedStep, unpack
from model_runner_base.step.request_layout import QUERY_START, STARTS
from model_runner_base.step.request_states import BlockTable, DeviceRows, known_or
from model_runner_base.step.sizes import Dim, StepKind, StepLimits, StepSize, Tiling
from model_runner_base.step.trace import LayerTrace, SeenKeys
from model_runner_base.vllm_compat.types.attention_metadata import StepBounds, StepOnDevice, common_metadata

NO_SLOT = -1
"""Slot of padding, to which kernels write nothing."""


def decode_dims(decode: Tiling) -> tuple[Dim, ...]:
    """Dims that sizes have in addition to the common ones where decode rows have more than one token."""
    free = (0.0, 0.0, 0.0)
    return (Dim("decode_rows", free), Dim("chunk_tokens", free)) if decode.query > 1 else ()


class StepRequests(NamedTuple):
    """Requests of one run of the model, as builders are told of them: R requests, padding included."""

    rows: torch.Tensor
    """[R] int32 row of each request."""
    query_start_loc: torch.Tensor
    """[R + 1] int32 index of each request's first token, and the number of tokens."""
    seq_lens: torch.Tensor
    """[R] int32 number of tokens in the cache after the run."""
    host_query_start_loc: np.ndarray
    """[R + 1] ``query_start_loc`` on the host."""
    host_seq_lens: np.ndarray
    """[R] upper bounds of ``seq_lens``; those of chunks are exact."""
    is_exact: bool
    """Whether ``host_seq_lens`` of decode rows are exact, too."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """Upper bound of the sequence lengths."""


class BuilderCaches(CacheKind):
    """Groups with one metadata builder each; tensors that kernels read lie at fixed addresses.

    A backend may set the attribute ``metadata_are_views = True`` if its metadata are nothing but the step's tensors,
    and numbers that a captured size fixes. Then no builder is called when a captured step runs again. Builders of other
    backends also plan each step, so they are called before each one.
    """

    reads = (STARTS, QUERY_START, "rows")
    is_planned = False

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [group for group in model.groups if not group.reads_plans]
        if not groups:
            return None
        if model.spans is not NO_SPANS:
            raise UnsupportedConfigError(
                "tokens of an image see each other, which only the base's own attention supports"
            )
        if len(groups) < len(model.groups):
            names = sorted({group.backend.get_name() for group in groups})
            raise UnsupportedConfigError(
                f"layers with attention backend {', '.join(names)} cannot be mixed with the base's own attention: "
                "choose one backend for all layers"
            )
        return cls(groups, model.limits, model.vllm_config, model.device_ops)

    def __init__(
        self, groups: Sequence[AttentionGroup], limits: StepLimits, vllm_config: VllmConfig, device_ops: DeviceOps
    ) -> None:
        self.groups = groups
        self.limits = limits
        self._device_ops = device_ops
        for group in groups:
            _check_block_size(group)
        self._builders: list[AttentionMetadataBuilder] = [
            group.backend.get_builder_cls()(group.spec, group.layer_names, vllm_config, device_ops.device)
            for group in groups
        ]
        thresholds = [builder.reorder_batch_threshold for builder in self._builders]
        self.threshold = min((value for value in thresholds if value is not None), default=None)
        self._query = limits.decode.query
        self._plans_each_step = not all(map(_has_views, groups))
        num_missing = limits.pass_tokens - 1
        self._tables = {
            id(group.block_table): _DeviceTable(group.block_table, num_missing, device_ops) for group in groups
        }
        self._block_tables = [
            device_ops.zeros((limits.max_num_reqs, self._table_of(group).shape[1]), torch.int32) for group in groups
        ]
        """Block table of each group, [max_num_reqs, blocks], with the step's requests in the step's order."""
        max_num_tokens = limits.max_num_tokens + limits.max_num_reqs * num_missing
        self._slots = [device_ops.zeros((max_num_tokens,), torch.int64) for _ in groups]
        self._query_start_loc = device_ops.zeros((limits.max_num_reqs + 1,), torch.int32)
        self._seq_lens = device_ops.zeros((limits.max_num_reqs,), torch.int32)
        self._wait_for_last: Callable[[], None] = lambda: None
        self._batch: InputBatch | None = None
        self._step: PackedStep
        self._metadata: dict[str, Any] = {}

    def _table_of(self, group: AttentionGroup) -> torch.Tensor:
        """[rows + 1, blocks] int32 block table of the group on the device."""
        return self._tables[id(group.block_table)].tensor

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        """Returns nothing: the kind has no section of the buffer, and sends rows of block tables as they change."""
        return ()

    # ---- On the device ----

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        for table in self._tables.values():
            table.update()
        self._batch, self._step = batch, step
        if self._plans_each_step:
            # While a step is repeated, the changes are not in the buffer yet; but these sections never change then.
            arrays, computed = unpack(step.on_device, step.sections), rows.tensors[1]
            self._metadata = self._plan(self._requests_of_step(step.size, arrays, computed))

    def bind(self, call: ModelCall) -> None:
        self._set_slot_mapping(call)
        metadata = self._metadata
        if not self._plans_each_step:
            metadata = self._build(self._requests_of_step(call.size, call.arrays, call.row_computed))
        call.metadata.update(metadata)

    def bind_rows(self, call: ModelCall) -> None:
        self._set_slot_mapping(call)
        call.metadata.update(self._plan(self._requests_of_rows(call)))

    def _set_slot_mapping(self, call: ModelCall) -> None:
        for group, buffer in zip(self.groups, self._slots, strict=True):
            slots = buffer[: len(call.token_rows)]
            block_size = group.block_table.block_size
            slots.copy_(self._slots_of(self._table_of(group), block_size, call.token_rows, call.positions))
            call.slot_mapping.update(dict.fromkeys(group.layer_names, slots))

    def _slots_of(
        self, table: torch.Tensor, block_size: int, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[T] int64 slots for each token's key and value, by a block table [rows + 1, blocks]; NO_SLOT for padding."""
        slots = table[rows, positions // block_size].long() * block_size + positions % block_size
        return slots.masked_fill(rows == self.limits.max_num_reqs, NO_SLOT)

    # ---- Metadata ----

    def _requests_of_step(
        self, size: StepSize, arrays: dict[str, torch.Tensor], computed: torch.Tensor
    ) -> StepRequests:
        """Requests of the step itself. A run on padding is described as the largest step of its size."""
        batch, loc = self._batch, arrays[QUERY_START]
        host_loc = self._step.views[QUERY_START].copy()
        query_len = np.diff(host_loc)
        seq_lens = query_len.copy()
        if batch is not None:
            seq_lens[: batch.num_reqs] += batch.num_computed.astype(seq_lens.dtype)
        longest = self.limits.max_model_len + self._query - 1 if batch is None else int(seq_lens.max())
        is_decode = size.kind == StepKind.DECODE
        return StepRequests(
            rows=arrays["rows"],
            query_start_loc=loc,
            seq_lens=known_or(arrays[STARTS], computed) + loc.diff(),
            host_query_start_loc=host_loc,
            host_seq_lens=seq_lens,
            is_exact=batch is None or not self.limits.unread,
            # In pure decode, padding counts as a request for each row; in other steps kernels leave padding out.
            num_tokens=size.num_tokens if batch is None or is_decode else batch.num_places,
            max_query_len=self._query if is_decode else size.num_tokens if batch is None else int(query_len.max()),
            max_seq_len=longest,
        )

    def _requests_of_rows(self, call: ModelCall) -> StepRequests:
        """Requests of a pass of drafting; only the device knows where their rows are."""
        batch, rows, has_chunks = self._batch, call.decode_rows, call.has_chunks
        assert rows is not None
        num_rows, query = rows.positions.shape
        num_reqs = call.size.num_reqs if has_chunks else num_rows
        query_len = np.diff(self._step.views[QUERY_START][: num_reqs + 1])
        query_len[:num_rows] = query
        host_loc = np.concatenate(([0], query_len.cumsum()))
        loc = torch.arange(num_rows + 1, dtype=torch.int32, device=call.positions.device) * query
        seq_lens = rows.positions[:, 0] + query
        if rows.is_token is not None:  # Padding, or a row at the draft model's length limit: no result depends on it.
            seq_lens = seq_lens.masked_fill(~rows.is_token.any(1), query)
        if has_chunks:
            step_loc = call.arrays[QUERY_START]
            loc = torch.cat((loc, step_loc[num_rows + 1 :] + num_rows * (query - self._query)))
            starts = known_or(call.arrays[STARTS], call.row_computed)
            seq_lens = torch.cat((seq_lens, (starts + step_loc.diff())[num_rows:]))
        longest, host_seq_lens = self.limits.max_model_len, query_len.copy()
        if batch is None:
            host_seq_lens[:num_rows] += longest
        else:
            longest = min(longest, int(batch.seq_lens.max()))
            host_seq_lens[: batch.num_decodes] += batch.seq_lens[: batch.num_decodes]
            if has_chunks:
                of_chunks = batch.seq_lens[batch.num_decodes :]
                host_seq_lens[num_rows : num_rows + len(of_chunks)] = of_chunks
        host_seq_lens[:num_rows] += self.limits.ahead
        return StepRequests(
            rows=call.arrays["rows"][:num_reqs],
            query_start_loc=loc,
            seq_lens=seq_lens,
            host_query_start_loc=host_loc,
            host_seq_lens=host_seq_lens,
            is_exact=False,
            num_tokens=int(host_loc[-1]),
            max_query_len=int(query_len.max()),
            max_seq_len=longest + self.limits.ahead + query,
        )

    def _plan(self, requests: StepRequests) -> dict[str, Any]:
        """Calls ``_build`` once the copies of the last plan are done, since builders overwrite their host buffers."""
        self._wait_for_last()
        metadata = self._build(requests)
        self._wait_for_last = self._device_ops.mark()
        return metadata

    def _build(self, requests: StepRequests) -> dict[str, Any]:
        """Fills the tensors at fixed addresses that builders and kernels read, and calls the builders."""
        num_reqs = len(requests.seq_lens)
        self._query_start_loc[: num_reqs + 1].copy_(requests.query_start_loc)
        self._seq_lens[:num_reqs].copy_(requests.seq_lens)
        metadata = {}
        for index, (group, builder) in enumerate(zip(self.groups, self._builders, strict=True)):
            torch.index_select(self._table_of(group), 0, requests.rows, out=self._block_tables[index][:num_reqs])
            common = self._common_metadata(requests, index)
            metadata.update(dict.fromkeys(group.layer_names, self._built(builder, common)))
        return metadata

    def _built(self, builder: AttentionMetadataBuilder, common: Any) -> Any:
        """Metadata of one group; those of a run on padding may be captured."""
        if self._batch is None and self._plans_each_step:
            return builder.build_for_cudagraph_capture(common)
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def _common_metadata(self, requests: StepRequests, index: int) -> Any:
        """vLLM's common metadata for one group."""
        num_reqs = len(requests.seq_lens)
        step = StepOnDevice(
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            seq_lens=self._seq_lens[:num_reqs],
            block_table=self._block_tables[index][:num_reqs],
            slot_mapping=self._slots[index][: requests.num_tokens],
        )
        bounds = StepBounds(
            query_start_loc=torch.from_numpy(requests.host_query_start_loc).int(),
            seq_lens=torch.from_numpy(requests.host_seq_lens).int(),
            is_exact=requests.is_exact,
            max_query_len=requests.max_query_len,
            max_seq_len=requests.max_seq_len,
        )
        return common_metadata(step, bounds)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        """Traces made from the block tables on the device, which kernels read causally and within the key range."""
        rows, traces = call.token_rows, dict[str, LayerTrace]()
        for group in self.groups:
            size = group.block_table.block_size
            table = self._device_ops.to_host(self._table_of(group)).copy()
            slots = self._slots_of(torch.from_numpy(table), size, rows, call.positions).numpy()
            first = group.key_range.first(call.positions)
            begin = torch.zeros_like(call.positions) if first is None else first
            places = zip(rows.tolist(), begin.tolist(), call.positions.tolist(), strict=True)
            seen = []
            for row, start, position in islice(places, batch.num_places):
                keys = np.arange(start, position + 1)
                seen.append(SeenKeys(keys, table[row, keys // size].astype(np.int64) * size + keys % size))
            traces.update(dict.fromkeys(group.layer_names, LayerTrace(slots, seen)))
        return traces


def _has_views(group: AttentionGroup) -> bool:
    """Whether the group's metadata are views. They are not with a chunked key range: vLLM cuts requests anew each
    step."""
    return getattr(group.backend, "metadata_are_views", False) and not group.key_range.chunk


def _check_block_size(group: AttentionGroup) -> None:
    block_size = group.block_table.block_size
    if not group.backend.supports_block_size(block_size):
        sizes = group.backend.get_supported_kernel_block_sizes()
        allowed = ", ".join(f"a multiple of {x.base}" if isinstance(x, MultipleOf) else str(x) for x in sizes)
        raise UnsupportedConfigError(
            f"attention backend {group.backend.get_name()} has no kernel for blocks of {block_size} tokens: "
            f"use block_size={allowed}"
        )


class _DeviceTable:
    """Copy of a block table on the device, with one more row of null blocks for padding.

    It has more columns where kernels read ``num_missing`` positions after the longest request's.
    """

    def __init__(self, table: BlockTable, num_missing: int, device_ops: DeviceOps) -> None:
        self._table = table
        self._device_ops = device_ops
        rows, blocks = table.table.shape
        self.tensor = device_ops.zeros((rows + 1, blocks + -(-num_missing // table.block_size)), torch.int32)

    def update(self) -> None:
        """Sends the rows that changed, up to the blocks in use."""
        table = self._table
        rows = np.flatnonzero(table.has_changed)
        if len(rows):
            table.has_changed[rows] = False
            width = int(table.num_blocks[rows].max())
            sent = self._device_ops.to_device(np.column_stack((rows, table.table[rows, :width])).astype(np.int32))
            self.tensor[:, :width].index_put_((sent[:, 0],), sent[:, 1:])
