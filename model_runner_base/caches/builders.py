"""Groups whose backends have kernels of their own: through vLLM's metadata builders.

A step sends each request's row, where it starts, and how many tokens it has. Block tables lie on the device, a row a
request, and only rows that changed are sent; positions, sequence lengths and cache slots are worked out there. So a
step that repeats the last one sends nothing but the blocks that requests entered.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf

from model_runner_base.attention.trace import LayerTrace, SeenKeys
from model_runner_base.caches.group import AttentionGroup, CacheKind, DeviceStarts
from model_runner_base.device_ops import DeviceOps
from model_runner_base.limits import UnsupportedConfigError
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.requests.device_rows import DeviceRows, known_or
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.builder import BatchOrder
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep, Section, pad_into, unpack
from model_runner_base.step.repeat import RepeatPart
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.vllm_port.attention_metadata import StepBounds, StepOnDevice, common_metadata

NO_SLOT = -1
"""Kernels write nothing there."""


class BuilderCaches(CacheKind):
    """One metadata builder a group; tensors that kernels read lie at fixed addresses.

    A backend whose metadata are nothing but the step's tensors, and numbers that a captured size fixes, says so by an
    attribute, ``metadata_are_views = True``: a captured step needs no builder when it is run again. Builders of other
    backends also plan each step, and are called before each.
    """

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
        threshold = min((value for value in thresholds if value is not None), default=None)
        if threshold is not None:
            self.order = BatchOrder(threshold, fresh_last=True)
        self._plans_each_step = not all(map(_has_views, groups))
        self._tables = {id(group.block_table): _DeviceTable(group.block_table, device_ops) for group in groups}
        self._block_tables = [
            device_ops.zeros((limits.max_num_reqs, group.block_table.table.shape[1]), torch.int32) for group in groups
        ]
        """[max_num_reqs, blocks] a group: those of the step's requests, in its order."""
        self._slots = [device_ops.zeros((limits.max_num_tokens,), torch.int64) for _ in groups]
        self._query_start_loc = device_ops.zeros((limits.max_num_reqs + 1,), torch.int32)
        self._seq_lens = device_ops.zeros((limits.max_num_reqs,), torch.int32)
        self._wait_for_last: Callable[[], None] = lambda: None
        self._batch: InputBatch | None = None
        self._step: PackedStep
        self._metadata: dict[str, Any] = {}

    # ---- On the host ----

    def needs(self, batch: InputBatch) -> list[StepSize]:
        """Only tokens and requests count: kernels cut the work into tiles themselves."""
        kind = StepKind.DECODE if batch.num_tokens == batch.num_reqs else StepKind.MIXED
        reqs = batch.num_reqs
        return [self.limits.size(kind, tokens=batch.num_tokens, requests=reqs, logits=reqs)]

    def sections(self, size: StepSize) -> list[Section]:
        return [
            Section("starts", (size.num_reqs,)),
            Section("query_start_loc", (size.num_reqs + 1,)),
        ]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Padding requests have no tokens and an empty row."""
        pad_into(views["query_start_loc"], batch.query_start, batch.num_tokens)
        # A request of one token, which the device alone knows, has its position there too.
        first = views["token_ids"][batch.query_start]
        pad_into(views["starts"], np.where(first < 0, first, batch.num_computed), 0)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Requests that share the tokens evenly, none longer than the model allows, and have nothing in the cache."""
        requests = np.arange(size.num_reqs + 1)
        even = requests * size.num_tokens // size.num_reqs
        views["query_start_loc"][:] = np.minimum(even, requests * self.limits.max_model_len)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        return [DeviceStarts(step.views["starts"], batch.rows)]

    # ---- On the device ----

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        for table in self._tables.values():
            table.update()
        self._batch, self._step = batch, step
        if self._plans_each_step:
            self._wait_for_last()  # Builders copy from host buffers of their own, which they fill again now.
            # Entries of a repeated step, which are not in the buffer yet, are never of these sections.
            arrays, (_, computed) = unpack(step.on_device, step.sections), rows.tensors
            self._metadata = self._build(step.size, arrays, computed)
            self._wait_for_last = self._device_ops.mark()

    def bind(self, call: ModelCall) -> None:
        rows, call.positions = self._places(call)
        for group, buffer in zip(self.groups, self._slots, strict=True):
            table, block_size = self._tables[id(group.block_table)].tensor, group.block_table.block_size
            slots = buffer[: call.size.num_tokens]
            slots.copy_(self._slots_of(table, block_size, rows, call.positions))
            call.slot_mapping.update(dict.fromkeys(group.layer_names, slots))
        metadata = self._metadata if self._plans_each_step else self._build(call.size, call.arrays, call.computed)
        call.metadata.update(metadata)

    def _places(self, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] the row of each token's request, and the token's position; of padding the padding row, and 0."""
        rows, loc = call.arrays["rows"], call.arrays["query_start_loc"]
        starts = known_or(call.arrays["starts"], call.computed)
        if call.size.kind == StepKind.DECODE:
            return rows, starts  # A request a token.
        token = torch.arange(call.size.num_tokens, dtype=torch.int32, device=loc.device)
        request = torch.searchsorted(loc[1:], token, right=True, out_int32=True).clamp(max=call.size.num_reqs - 1)
        is_padding = token >= loc[-1]
        positions = (starts - loc[:-1])[request] + token
        return rows[request].masked_fill(is_padding, self.limits.max_num_reqs), positions.masked_fill(is_padding, 0)

    def _slots_of(
        self, table: torch.Tensor, block_size: int, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[T] int64 where each token's key and value go, by a block table [rows + 1, blocks]; padding has no slot."""
        slots = table[rows, positions // block_size].long() * block_size + positions % block_size
        return slots.masked_fill(rows == self.limits.max_num_reqs, NO_SLOT)

    def _build(self, size: StepSize, arrays: dict[str, torch.Tensor], computed: torch.Tensor) -> dict[str, Any]:
        """Fills what builders and kernels read of requests, at fixed addresses, and calls the builders."""
        loc = arrays["query_start_loc"]
        self._query_start_loc[: size.num_reqs + 1].copy_(loc)
        self._seq_lens[: size.num_reqs].copy_(known_or(arrays["starts"], computed) + loc.diff())
        metadata = {}
        for index, (group, builder) in enumerate(zip(self.groups, self._builders, strict=True)):
            table = self._tables[id(group.block_table)].tensor
            torch.index_select(table, 0, arrays["rows"], out=self._block_tables[index][: size.num_reqs])
            common = self._common_metadata(size, index)
            if self._batch is None and self._plans_each_step:
                built = builder.build_for_cudagraph_capture(common)
            else:
                built = builder.build(common_prefix_len=0, common_attn_metadata=common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _common_metadata(self, size: StepSize, index: int) -> Any:
        """vLLM's, for one group. A run of padding stands for the largest step of its size."""
        batch = self._batch
        query_start_loc = torch.from_numpy(self._step.views["query_start_loc"].copy())
        seq_lens = query_start_loc.diff()
        if batch is not None:
            seq_lens[: batch.num_reqs] = torch.from_numpy(batch.seq_lens).int()
        # A graph of pure decode counts its padding, a request for each token; elsewhere kernels leave padding out.
        num_tokens = size.num_tokens if batch is None or size.kind == StepKind.DECODE else batch.num_tokens
        longest_query = size.num_tokens if batch is None else int(batch.query_len.max())
        step = StepOnDevice(
            query_start_loc=self._query_start_loc[: size.num_reqs + 1],
            seq_lens=self._seq_lens[: size.num_reqs],
            block_table=self._block_tables[index][: size.num_reqs],
            slot_mapping=self._slots[index][:num_tokens],
        )
        bounds = StepBounds(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=1 if size.kind == StepKind.DECODE else longest_query,
            max_seq_len=self.limits.max_model_len if batch is None else int(batch.seq_lens.max()),
        )
        return common_metadata(step, bounds)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        """From the block tables as they lie on the device: kernels read them, causally and within the sight."""
        rows, call.positions = self._places(call)
        traces = {}
        for group in self.groups:
            size = group.block_table.block_size
            table = self._device_ops.to_host(self._tables[id(group.block_table)].tensor).copy()
            slots = self._slots_of(torch.from_numpy(table), size, rows, call.positions).numpy()
            first = group.sight.first(call.positions)
            begin = torch.zeros_like(call.positions) if first is None else first
            places = zip(rows.tolist(), begin.tolist(), call.positions.tolist(), strict=True)
            seen = []
            for row, start, position in islice(places, batch.num_tokens):
                keys = np.arange(start, position + 1)
                seen.append(SeenKeys(keys, table[row, keys // size].astype(np.int64) * size + keys % size))
            traces.update(dict.fromkeys(group.layer_names, LayerTrace(slots, seen)))
        return traces


def _has_views(group: AttentionGroup) -> bool:
    """Whether the group's metadata are views; vLLM cuts requests at their chunks anew for each step."""
    return getattr(group.backend, "metadata_are_views", False) and not group.sight.chunk


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
    """A block table's copy on the device, with one row more, of null blocks, for padding."""

    def __init__(self, table: BlockTable, device_ops: DeviceOps) -> None:
        self._table = table
        self._device_ops = device_ops
        rows, blocks = table.table.shape
        self.tensor = device_ops.zeros((rows + 1, blocks), torch.int32)

    def update(self) -> None:
        """Sends the rows that changed, as far as they are in use."""
        table = self._table
        rows = np.flatnonzero(table.has_changed)
        if len(rows):
            table.has_changed[rows] = False
            width = int(table.num_blocks[rows].max())
            sent = self._device_ops.to_device(np.column_stack((rows, table.table[rows, :width])).astype(np.int32))
            self.tensor[:, :width].index_put_((sent[:, 0],), sent[:, 1:])
