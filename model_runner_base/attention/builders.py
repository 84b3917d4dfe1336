"""The attention adapter of devices whose backends have kernels: through vLLM's own metadata builders.

vLLM's unstable ``CommonAttentionMetadata`` is made here and nowhere else. A step sends sequence lengths, query starts,
slots and each request's row; block tables lie on the device, a row a request, and only rows that changed are sent.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf

from model_runner_base.attention.adapter import AttentionAdapter, AttentionGroup
from model_runner_base.block_tables import BlockTable
from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.host_loops import compiled
from model_runner_base.input_batch import InputBatch, PackedStep, Section, pad_into, unpack
from model_runner_base.limits import UnsupportedConfigError

VIEWS_ONLY = frozenset({"TRITON_ATTN"})
"""Backends whose metadata are the step's tensors, and numbers that a captured size fixes: a captured step needs no
builder when it is run again. Builders of other backends also plan each step, and are called for each."""

NO_SLOT = -1
"""Kernels write nothing there."""


class BuilderAttentionAdapter(AttentionAdapter):
    """One metadata builder a group; tensors that kernels read lie at fixed addresses."""

    def __init__(
        self, groups: list[AttentionGroup], limits: StepLimits, vllm_config: VllmConfig, device_ops: DeviceOps
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
        self.decode_threshold = min((value for value in thresholds if value is not None), default=None)
        self._plans_each_step = any(group.backend.get_name() not in VIEWS_ONLY for group in groups)
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
        self._packed: PackedStep
        self._metadata: dict[str, Any] = {}

    # ---- On the host ----

    def plan(self, batch: InputBatch) -> list[Any]:
        return []

    def needed_sizes(self, batch: InputBatch, plans: list[Any]) -> list[GraphSize]:
        """Only tokens and requests count: kernels cut the work into tiles themselves."""
        query_tile = 1 if batch.is_uniform_decode else self.limits.query_tile
        return [GraphSize(query_tile, batch.num_tokens, batch.num_reqs, 0, 0)]

    def sections(self, size: GraphSize) -> list[Section]:
        slots = [Section(f"slots.{index}", (size.num_tokens,), grows=True) for index in range(len(self.groups))]
        return [
            *slots,
            Section("seq_lens", (size.num_reqs,), grows=True),
            Section("query_start_loc", (size.num_reqs + 1,)),
            Section("table_rows", (size.num_reqs,)),
        ]

    def pack(self, batch: InputBatch, plans: list[Any], size: GraphSize, views: dict[str, np.ndarray]) -> None:
        """Padding requests have no tokens and an empty row, padding tokens no slot."""
        pad_into(views["seq_lens"], batch.seq_lens, 0)
        pad_into(views["query_start_loc"], batch.query_start, batch.num_tokens)
        pad_into(views["table_rows"], batch.rows, self.limits.max_num_reqs)
        for index, group in enumerate(self.groups):
            table = group.block_table
            fill_flat_slots(
                table.block_size, batch.query_len, batch.num_computed, batch.rows, table.table, views[f"slots.{index}"]
            )

    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """Requests that share the tokens evenly, none longer than the model allows, and have nothing in the cache."""
        num_reqs, num_tokens = len(views["seq_lens"]), len(views["positions"])
        requests = np.arange(num_reqs + 1)
        query_start = np.minimum(requests * num_tokens // num_reqs, requests * self.limits.max_model_len)
        views["query_start_loc"][:] = query_start
        views["seq_lens"][:] = np.diff(query_start)
        views["table_rows"][:] = self.limits.max_num_reqs
        for index in range(len(self.groups)):
            views[f"slots.{index}"][:] = NO_SLOT

    def steady_plans(
        self, batch: InputBatch, plans: list[Any], size: GraphSize, views: dict[str, np.ndarray]
    ) -> "list[_SteadySlots] | None":
        return [_SteadySlots(group.block_table, batch.rows, views, index) for index, group in enumerate(self.groups)]

    # ---- On the device ----

    def prepare(self, batch: InputBatch | None, packed: PackedStep) -> None:
        for table in self._tables.values():
            table.update()
        self._batch, self._packed = batch, packed
        if self._plans_each_step:
            assert packed.on_device is not None
            self._wait_for_last()  # Builders copy from host buffers of their own, which they fill again now.
            self._metadata = self._make(packed.size, unpack(packed.on_device, packed.sections))
            self._wait_for_last = self._device_ops.mark()

    def build(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
        return self._metadata if self._plans_each_step else self._make(size, arrays)

    def slot_mapping(self, size: GraphSize) -> dict[str, torch.Tensor]:
        return {
            name: slots[: size.num_tokens]
            for group, slots in zip(self.groups, self._slots, strict=True)
            for name in group.layer_names
        }

    def _make(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Fills what lies at fixed addresses, and calls the builders."""
        self._query_start_loc[: size.num_reqs + 1].copy_(arrays["query_start_loc"])
        self._seq_lens[: size.num_reqs].copy_(arrays["seq_lens"])
        metadata = {}
        for index, (group, builder) in enumerate(zip(self.groups, self._builders, strict=True)):
            table = self._tables[id(group.block_table)].tensor
            torch.index_select(table, 0, arrays["table_rows"], out=self._block_tables[index][: size.num_reqs])
            self._slots[index][: size.num_tokens].copy_(arrays[f"slots.{index}"])
            common = self._common_metadata(size, index)
            if self._batch is None and self._plans_each_step:
                built = builder.build_for_cudagraph_capture(common)
            else:
                built = builder.build(common_prefix_len=0, common_attn_metadata=common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _common_metadata(self, size: GraphSize, index: int) -> CommonAttentionMetadata:
        """vLLM's, for one group. A run of padding stands for the largest step of its size."""
        batch, views = self._batch, self._packed.views
        query_start_loc, seq_lens = (torch.from_numpy(views[name].copy()) for name in ("query_start_loc", "seq_lens"))
        # A graph of pure decode counts its padding, a request for each token; elsewhere kernels leave padding out.
        num_tokens = size.num_tokens if batch is None or size.query_tile == 1 else batch.num_tokens
        longest_query = size.num_tokens if batch is None else int(batch.query_len.max())
        return CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: size.num_reqs + 1],
            query_start_loc_cpu=query_start_loc,
            seq_lens=self._seq_lens[: size.num_reqs],
            num_reqs=size.num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=1 if size.query_tile == 1 else longest_query,
            max_seq_len=self.limits.max_model_len if batch is None else int(batch.seq_lens.max()),
            block_table_tensor=self._block_tables[index][: size.num_reqs],
            slot_mapping=self._slots[index][:num_tokens],
            _seq_lens_cpu=seq_lens,
            _num_computed_tokens_cpu=seq_lens - query_start_loc.diff(),
        )


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


class _SteadySlots:
    """One group's slots in steady decode: they grow by one, but for those of requests that enter a block."""

    def __init__(self, table: BlockTable, rows: np.ndarray, views: dict[str, np.ndarray], index: int) -> None:
        self._table = table
        self._rows = rows
        self._name = f"slots.{index}"
        self._positions = views["positions"]
        self._slots = views[self._name]

    def begin(self, increments: dict[str, np.ndarray]) -> None:
        num_reqs = len(self._rows)
        increments["seq_lens"][:num_reqs] = 1
        increments[self._name][:num_reqs] = 1
        block_size = self._table.block_size
        self._steps_to_entry = block_size - int((self._positions[:num_reqs] % block_size).max())

    def advance(self) -> bool:
        self._steps_to_entry -= 1
        if not self._steps_to_entry:
            table = self._table
            self._steps_to_entry = enter_flat_slots(
                table.block_size, self._positions, self._rows, table.table, self._slots
            )
        return True


@compiled
def fill_flat_slots(
    block_size: int,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Where each token's key and value go: block times block size plus offset."""
    token = 0
    for request in range(len(rows)):
        for position in range(num_computed[request], num_computed[request] + query_len[request]):
            block = position // block_size
            slots[token] = table[rows[request], block] * block_size + position - block * block_size
            token += 1
    slots[token:] = NO_SLOT


@compiled
def enter_flat_slots(
    block_size: int, positions: np.ndarray, rows: np.ndarray, table: np.ndarray, slots: np.ndarray
) -> int:
    """Sees to the requests at the first position of a block; returns after how many steps the next one is."""
    steps = block_size
    for request in range(len(rows)):
        block = positions[request] // block_size
        offset = positions[request] - block * block_size
        if offset == 0:
            slots[request] = table[rows[request], block] * block_size
        steps = min(steps, block_size - offset)
    return steps
