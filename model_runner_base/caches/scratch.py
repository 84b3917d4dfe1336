"""Scratch cache: memory for the keys and values of layers that keep nothing for a later step.

Each token of vLLM's encoder-only attention sees its whole request. So a request has to be whole in one step, and its
keys are not needed afterwards. All such layers share one scratch cache, since each reads only what it has written
itself. The cache holds the largest step: separate blocks for each request, and the null block for padding. Its plan is
that of a paged group, but with another key range and with a block table that is written anew in each step.

Example, with blocks of 4: "a" (row 7) has 5 tokens, "b" (row 2) has 1. Row 7 of the table begins with blocks 1 and 2,
row 2 with block 3. Every token of "a" sees keys 0 to 4. "b" has a chunk of one token, and sees itself.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from vllm.config import VllmConfig

from model_runner_base.attention.paged import reads_plans
from model_runner_base.attention.plan import stored_block_size
from model_runner_base.caches.group import AttentionGroup, ModelCaches, OwnTensors
from model_runner_base.caches.paged import PlannedCaches
from model_runner_base.caches.spans import NO_SPANS
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.step.token_layout import PairNeed, Placed
from model_runner_base.vllm_compat.types.kv_cache import cacheless_layers


def num_scratch_blocks(block_size: int, max_num_tokens: int, max_num_reqs: int) -> int:
    """Number of blocks for the largest step: each request may leave its last block ragged; block 0 is the null
    block."""
    return -(-max_num_tokens // block_size) + max_num_reqs + 1


def check_serves_whole_requests(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError if layers without a cache could get a request in parts, or have no plan."""
    layers = cacheless_layers(vllm_config)
    refusals = {
        "use a model that pools": vllm_config.model_config.runner_type != "pooling",
        "set enable_chunked_prefill=False": vllm_config.scheduler_config.enable_chunked_prefill,
        "set enable_prefix_caching=False": vllm_config.cache_config.enable_prefix_caching,
        "use the base's own attention backend": not all(
            reads_plans(layer.get_attn_backend()) for layer in layers.values()
        ),
    }
    for advice, is_needed in refusals.items():
        if layers and is_needed:
            raise UnsupportedConfigError(f"layer {next(iter(layers))} sees each request whole, in one step: {advice}")


class ScratchTable(BlockTable):
    """Block table that is written anew for each step's requests, request after request."""

    def hand_out(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Gives blocks to requests of ``lengths`` [R] int64, in ``rows`` [R] int64."""
        hand_out_blocks(self.block_size, rows, lengths, self.table, self.num_blocks)


class ScratchCaches(PlannedCaches):
    """Groups on a scratch cache, whose block tables are written anew before each plan."""

    def __init__(self, groups: Sequence[AttentionGroup], limits: StepLimits) -> None:
        super().__init__(groups, limits, label="scratch_")
        tables = {id(group.block_table): group.block_table for group in groups}.values()
        self._tables = [table for table in tables if isinstance(table, ScratchTable)]

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [group for group in model.groups if group.key_range.is_whole]
        if groups and model.spans is not NO_SPANS:
            raise UnsupportedConfigError(
                "tokens of an image see each other, which layers without a cache do not support"
            )
        return cls(groups, model.limits) if groups else None

    @classmethod
    def own_tensors(cls, vllm_config: VllmConfig, kv_tile_target: int) -> list[OwnTensors]:
        """Scratch caches; there is one, unless layers' heads differ."""
        block_size = stored_block_size(vllm_config.cache_config.block_size, kv_tile_target)
        scheduler = vllm_config.scheduler_config
        num_blocks = num_scratch_blocks(block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        names: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, layer in cacheless_layers(vllm_config).items():
            backend = layer.get_attn_backend()
            shape = backend.get_kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_size)
            names.setdefault((shape, layer.kv_cache_torch_dtype), []).append(name)
        return [OwnTensors(layers, [form]) for form, layers in names.items()]

    def need(self, placed: Placed) -> PairNeed:
        """Counts the pairs of a step; raises UnsupportedConfigError for a request that is not whole in it."""
        batch = placed.batch
        is_partial = (batch.num_computed > 0) | ~batch.is_sampled
        if is_partial.any():
            index = int(is_partial.argmax())
            start, end = batch.num_computed[index], batch.seq_lens[index]
            raise UnsupportedConfigError(
                f"request {batch.req_ids[index]} comes in parts (tokens {start} to {end - 1} in this step), and layers "
                "without a KV cache see it whole: set enable_chunked_prefill=False and enable_prefix_caching=False"
            )
        return super().need(placed)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        for table in self._tables:
            table.hand_out(batch.rows, batch.query_len)
        super().fill(batch, size, views)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater] | None:
        """Returns None: no request is in two steps, so no step is repeated."""
        return None


@compiled
def hand_out_blocks(
    block_size: int, rows: np.ndarray, lengths: np.ndarray, table: np.ndarray, num_blocks: np.ndarray
) -> None:
    """Gives requests consecutive blocks from 1 on, request after request.

    The rest of a table row holds blocks of an earlier step. They exist, so a whole KV tile can be read.
    """
    block = 1
    for request in range(len(rows)):
        row = rows[request]
        count = (lengths[request] + block_size - 1) // block_size
        for index in range(count):
            table[row, index] = block + index
        num_blocks[row] = count
        block += count
