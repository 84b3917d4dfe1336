"""Contiguous cache: its lines, and decode over whole lines, without a gather of keys and values.

With ``block_size=max_model_len`` a request has one block, whose id is the number of its cache line. A step of decode
may then read the front of all lines as one slice of the cache. Each line is one pair with the token that decodes there,
so there is nothing to merge. The price is that unused lines are read as well, and that short contexts are read at the
length of the longest. Where that costs more than the pairs of a plan, the step is packed as with a paged cache.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from vllm.config import VllmConfig

from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.plan import kv_tile_for
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.paged import group_traces, paged_groups
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import STARTS, ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, geometric
from model_runner_base.step.trace import LayerTrace
from model_runner_base.vllm_compat.probes.config import asked_block_size
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout, KVCacheSpec, cross_length, useful_bytes


def is_contiguous(vllm_config: VllmConfig) -> bool:
    """Whether a block holds a whole request (``block_size=max_model_len``), so that a request has one cache line."""
    block_size = vllm_config.cache_config.block_size
    fits = block_size >= vllm_config.model_config.max_model_len
    return fits and block_size % kv_tile_for(block_size) == 0


LINE_UNIT = 64
"""Number of tokens of which cache lines hold a multiple where the device has no other blocks."""


def set_line_size(vllm_config: VllmConfig) -> None:
    """Sets the block size of a device that has cache lines alone: ``max_model_len``, rounded up.

    Raises UnsupportedConfigError if the user asks for blocks that hold less, or for a length that fits the memory.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    length = model.max_model_len
    if getattr(model, "original_max_model_len", None) == -1:
        raise UnsupportedConfigError(
            "max_model_len=-1 is not supported on this device, where a block holds a whole request: give a number"
        )
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedConfigError(
            "encoder-decoder models are not supported on this device, where a block holds a whole request: use another "
            "model"
        )
    asked = asked_block_size(cache)
    if asked is not None and asked < length:
        raise UnsupportedConfigError(
            f"block_size={asked} is not supported on this device, where a block holds a whole request: leave it out"
        )
    # A draft model's config shares the cache's, and may have a smaller length.
    if asked is None and (cache.block_size or 0) < length:
        cache.block_size = -(-length // LINE_UNIT) * LINE_UNIT  # type: ignore[assignment]


def useful_memory(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> float:
    """Bytes of KV cache that can be used: a contiguous cache needs one line for each request, and the null block."""
    # An encoder's output has a length of its own, so its blocks are no cache line.
    has_lines = is_contiguous(vllm_config) and not cross_length(vllm_config)
    lines = vllm_config.scheduler_config.max_num_seqs if has_lines else None
    return useful_bytes(vllm_config, specs, lines)


def num_lines(layout: CacheLayout, vllm_config: VllmConfig) -> int:
    """Number of lines of a contiguous cache, without the null block; 0 where reading all lines would not pay.

    It does not pay if there are more lines than requests, or if a request has a line in each of several groups.
    """
    count = layout.num_blocks - 1
    pays = len(layout.groups) == 1 and count <= vllm_config.scheduler_config.max_num_seqs
    return count if pays and is_contiguous(vllm_config) else 0


NO_TOKEN = -1


def contiguous_sizes(limits: StepLimits) -> list[StepSize]:
    """Sizes of decode by whole lines: all requests, contexts of 4, 6, 8, 12, 16, ... KV tiles; shorter ones gain
    nothing."""
    reqs, most = min(limits.max_num_reqs, limits.num_lines), _most_tiles(limits)
    tiles = {*geometric(4, most), *geometric(6, most)} if most else ()
    return [_line_size(limits, reqs, count) for count in sorted(tiles)]


def _most_tiles(limits: StepLimits) -> int:
    """Largest number of KV tiles that attention may hold of every line at a time; 0 if lines gain nothing.

    Longer contexts are read by pairs.
    """
    if not limits.num_lines:
        return 0
    most = limits.decode_piece // limits.num_lines if limits.decode_piece else limits.max_kv_tiles
    return min(limits.max_kv_tiles, most) if most >= min(4, limits.max_kv_tiles) else 0


def _line_size(limits: StepLimits, num_rows: int, kv_tiles: int) -> StepSize:
    """Size of a step by whole lines, in which every line is a pair of ``kv_tiles`` KV tiles."""
    return limits.size(
        StepKind.DECODE_CONTIGUOUS,
        tokens=num_rows,
        requests=num_rows,
        logits=num_rows,
        decode_rows=num_rows,
        decode_pairs=limits.num_lines * kv_tiles,
    )


class ContiguousDecode(CacheKind):
    """Metadata of steps by whole lines. In other steps it does nothing: a paged kind serves the same groups."""

    reads = (STARTS,)

    def __init__(self, groups: Sequence[AttentionGroup], limits: StepLimits) -> None:
        self._groups = groups
        self._limits = limits

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = paged_groups(model) if model.limits.num_lines else []
        return cls(groups, model.limits) if groups else None

    def other_sizes(self, batch: InputBatch) -> list[StepSize]:
        if not batch.is_decode:
            return []
        longest = -(-int(batch.seq_lens.max()) // self._limits.decode.keys)
        if longest > _most_tiles(self._limits):
            return []
        return [_line_size(self._limits, batch.num_reqs, longest)]

    def _kv_tiles(self, size: StepSize) -> int:
        """Number of KV tiles that are read of each line."""
        return size.plan_dims().decode_pairs // self._limits.num_lines

    def sections(self, size: StepSize) -> list[Section]:
        if size.kind != StepKind.DECODE_CONTIGUOUS:
            return []
        sections: list[Section] = []
        for index in range(len(self._groups)):
            sections += [
                Section(f"token_lines.{index}", (size.num_tokens,)),
                Section(f"line_tokens.{index}", (self._limits.num_lines,)),
            ]
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind != StepKind.DECODE_CONTIGUOUS:
            return
        for index, group in enumerate(self._groups):
            lines = lines_of(group, batch.rows)
            pad_into(views[f"token_lines.{index}"], lines, 0)
            views[f"line_tokens.{index}"][:] = NO_TOKEN
            views[f"line_tokens.{index}"][lines - 1] = np.arange(len(lines))

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.DECODE_CONTIGUOUS:
            for index in range(len(self._groups)):
                views[f"line_tokens.{index}"][:] = NO_TOKEN

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        if step.size.kind != StepKind.DECODE_CONTIGUOUS:
            return ()
        return [_StandingLines(self._kv_tiles(step.size) * self._limits.decode.keys)]

    def bind(self, call: ModelCall) -> None:
        if call.size.kind != StepKind.DECODE_CONTIGUOUS:
            return
        positions = call.positions
        for index, group in enumerate(self._groups):
            tile = group.kv_tile
            lines, tokens = call.arrays[f"token_lines.{index}"], call.arrays[f"line_tokens.{index}"]
            is_used, tokens = tokens >= 0, tokens.clamp(min=0)
            first = group.key_range.first(positions)
            plan = PairPlan(
                block_size=group.block_table.block_size,
                kv_tile=tile,
                pair_tile=tokens,
                pair_start=None,
                pair_blocks=None,
                last=torch.where(is_used, positions[tokens], NEVER).unsqueeze(1),
                first=None if first is None else first[tokens].unsqueeze(1),
                merge_tree=[],
                tile_slots=(lines - 1).clamp(min=0),
                line_tiles=self._kv_tiles(call.size),
            )
            metadata = PagedAttentionMetadata(
                slot_blocks=lines * group.block_table.blocks_per_kv_block + positions // tile,
                slot_offsets=positions % tile,
                num_decode_tokens=positions.shape[0],
                decode=plan,
                chunks=None,
            )
            call.metadata.update(dict.fromkeys(group.layer_names, metadata))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        if call.size.kind != StepKind.DECODE_CONTIGUOUS:
            return {}
        self.bind(call)
        return group_traces(self._groups, call)


def lines_of(group: AttentionGroup, rows: np.ndarray) -> np.ndarray:
    """Numbers of the requests' cache lines, from 1 on: 0 is the null block."""
    return group.block_table.table[rows, 0] // group.block_table.blocks_per_kv_block


class _StandingLines:
    """Upkeep of a packed step by whole lines: nothing changes while the longest context fits, since lines never
    change."""

    def __init__(self, context: int) -> None:
        self._context = context
        """Number of tokens that the packed size reads of every line."""
        self._longest = 0

    def begin(self, positions: np.ndarray) -> None:
        self._longest = int(positions.max()) + 1

    def advance(self, positions: np.ndarray) -> bool:
        """Returns whether one more token of the longest request fits the packed size."""
        self._longest += 1
        return self._longest <= self._context
