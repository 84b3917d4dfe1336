"""Paged groups without kernels: a block-sparse plan for plain torch, decode rows and chunk tiles each with their own.

A step's tokens lie so: first the decode rows, padded to ``decode_rows``; then the tokens of chunks, padded to
``chunk_tokens``. Rows are planned token by token, chunks in tiles of many tokens, since a tile reads each key once for
all its queries. What of a plan follows from positions (offsets, what is seen, cache slots) the graph works out.

Example: "a" in decode at position 130 (row 4), "b" with 100 tokens of its prompt, none of them computed; KV tiles of
64 positions for rows and 128 for chunks, chunk tiles of 64 tokens; run at 2 decode rows and 128 chunk tokens. What is
packed (docs/architecture.md has all of it):

    decode_starts      [-5, 0]             row 4's position is on the device; padding
    decode_pair_tile   [0, 0, 0, ...]      "a" meets KV tiles 0, 1, 2
    decode_pair_start  [0, 64, 128, FAR, ...]
    decode_own_blocks  [[block 8 of row 4], [0]]  where the key of position 130 goes, with blocks of 16; padding goes
                                           to the null block
    chunk_tile_starts  [0, 64, 100, ...]   tokens 0 to 63 and 64 to 99 of the chunks are a tile each
    chunk_tile_positions [0, 64, ...]
    chunk_pair_tile    [0, 1, ...]         both tiles meet KV tile 0
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.attention.loops import (
    FAN_IN,
    FAR,
    fill_merge_tree,
    fill_node_starts,
    fill_pairs,
    fill_starts,
    fill_tiles,
)
from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.plan import PairCount, PairGeometry
from model_runner_base.attention.trace import LayerTrace, trace_plan
from model_runner_base.caches.chunk_tiles import ChunkTiles
from model_runner_base.caches.decode_rows import LENGTHS, DecodeRows, fill_ring, ring_size
from model_runner_base.caches.group import AttentionGroup, CacheKind, DeviceStarts
from model_runner_base.caches.growth import GrowingPlan
from model_runner_base.caches.spans import NO_ENDS, NO_SPANS, SpanEnds, Spans
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.builder import BatchOrder
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.packing import Array, PackedStep, Section, pad_into
from model_runner_base.step.sizes import Dim, StepKind, StepLimits, StepSize, Tiling


def plan_dims(decode: Tiling, chunk: Tiling, cross_len: int = 0) -> tuple[Dim, ...]:
    """The dims of a step with plans. A pair costs the reading of its keys and the arithmetic of its queries.

    Each row and tile also meets the ``cross_len`` keys of an encoder's output.

    The weights lie between what was measured with a small model on a CPU, where pairs are dearer, and the arithmetic of
    a large model, where they are cheaper. A KV tile that is read in its line costs less than a gathered one
    (docs/kv_cache.md).
    """
    row, tile = (pair.keys / 64 * (1 + pair.query / 16) * cost for pair, cost in ((decode, 0.25), (chunk, 0.16)))
    cross_row, cross_tile = row * -(-cross_len // decode.keys), tile * -(-cross_len // chunk.keys)
    return (
        Dim("decode_rows", (cross_row, cross_row, 0.0)),
        Dim("decode_pairs", (row, row, 0.75 / 4)),
        Dim("chunk_tokens", (0.0, 0.0, 0.0)),
        Dim("chunk_tiles", (0.0, 1.0 + cross_tile, 0.0)),
        Dim("chunk_pairs", (0.0, tile, 0.0)),
    )


class _Names(NamedTuple):
    """A group's sections of one of the two plans."""

    pair_tile: str
    pair_start: str
    pair_blocks: str
    levels: list[str]
    own_blocks: str
    """Of decode rows."""
    last_pair: str
    """Of chunk tiles."""

    @classmethod
    def of(cls, plan: str, index: int, geometry: PairGeometry) -> "_Names":
        def name(part: str) -> str:
            return f"{plan}_{part}.{index}"

        levels = [f"{name('tree')}.{level}" for level in range(geometry.num_levels)]
        pairs = name("pair_tile"), name("pair_start"), name("pair_blocks")
        return cls(*pairs, levels, name("own_blocks"), name("last_pair"))

    def levels_of(self, arrays: dict[str, Array]) -> tuple[Array, ...]:
        return tuple([arrays[level] for level in self.levels])


class _Planned(NamedTuple):
    """A group with its two geometries and the names of its sections."""

    group: AttentionGroup
    decode: PairGeometry
    chunk: PairGeometry
    decode_names: _Names
    chunk_names: _Names


_Requests = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of some of a batch's requests: new tokens, tokens in the cache, rows."""


class _Counted(NamedTuple):
    """The batch whose needs were asked for, and the pairs of each group; those of chunks in a mixed step alone."""

    batch: InputBatch
    decodes: _Requests
    """With all positions that the rows may touch in place of their new tokens."""
    decode_counts: list[PairCount]
    chunks: _Requests | None = None
    chunk_counts: Sequence[PairCount] = ()
    spans: SpanEnds = NO_ENDS


class PagedCaches(CacheKind):
    """Plans and metadata for every group; all have the same decode rows and chunk tiles."""

    def __init__(self, groups: Sequence[AttentionGroup], limits: StepLimits, spans: Spans = NO_SPANS) -> None:
        self.groups = groups
        self.limits = limits
        self._spans = spans
        self.dims = plan_dims(limits.decode, limits.chunk)
        self.order = BatchOrder(limits.decode.query, row_len=limits.decode.query)
        self._planned = list(self._plan_groups())
        self._counted: _Counted

    def _plan_groups(self) -> Iterator[_Planned]:
        limits = self.limits
        for index, group in enumerate(self.groups):
            decode, chunk = (
                PairGeometry(group.block_table.block_size, query, keys, -(-limits.max_model_len // keys), group.sight)
                for query, keys in (
                    (limits.decode_reach, group.kv_tile),
                    (limits.chunk.query, group.chunk_kv_tile),
                )
            )
            names = _Names.of("decode", index, decode), _Names.of("chunk", index, chunk)
            yield _Planned(group, decode, chunk, *names)

    # ---- On the host ----

    def needs(self, batch: InputBatch) -> list[StepSize]:
        rows = batch.num_decodes
        decodes = self._reach_of(batch)
        decode_counts = [planned.decode.count(*decodes[:2], rows, NO_ENDS) for planned in self._planned]
        decode_pairs = max([count.num_pairs for count in decode_counts], default=0)
        if batch.is_decode:
            self._counted = _Counted(batch, decodes, decode_counts)
            return [self.limits.decode_size(rows, decode_pairs)]
        chunks = batch.query_len[rows:], batch.num_computed[rows:], batch.rows[rows:]
        num_chunks, num_tokens = batch.num_reqs - rows, int(chunks[0].sum())
        spans = self._spans.of_chunks(batch)
        chunk_counts = [planned.chunk.count(*chunks[:2], num_tokens, spans) for planned in self._planned]
        self._counted = _Counted(batch, decodes, decode_counts, chunks, chunk_counts, spans)
        chunk_pairs = max([count.num_pairs for count in chunk_counts], default=0)
        num_tiles = max([count.num_tiles for count in chunk_counts], default=0)
        return [self.limits.mixed_size(rows, decode_pairs, num_tokens, num_chunks, chunk_pairs, num_tiles)]

    def _reach_of(self, batch: InputBatch) -> _Requests:
        """The decode rows: how many positions each may touch in this step, and from which one on."""
        limits, rows = self.limits, batch.num_decodes
        query_len, num_computed = batch.query_len[:rows], batch.num_computed[:rows]
        if limits.decode_reach > 1:
            stop = np.minimum(num_computed + query_len + limits.ahead, limits.max_model_len)
            num_computed = np.maximum(num_computed - limits.unread, 0)
            query_len = stop - num_computed
        return query_len, num_computed, batch.rows[:rows]

    def _dims(self, size: StepSize) -> tuple[int, ...]:
        """Decode rows and pairs; chunk tokens, tiles and pairs."""
        return size.dims[3:8]

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        return num_decode_tokens if size.kind != StepKind.MIXED else self._dims(size)[0] * self.limits.decode.query

    def sections(self, size: StepSize) -> list[Section]:
        num_rows, num_pairs, num_tokens, num_tiles, num_chunk_pairs = self._dims(size)
        sections = [Section("decode_starts", (num_rows,))]
        if self.limits.decode.query > 1:
            sections.append(Section(LENGTHS, (num_rows,)))
        # Only a plan of pure decode is ever added to: its nodes have room for children.
        is_mixed = size.kind == StepKind.MIXED
        for planned in self._planned:
            ring = ring_size(self.limits.decode_reach, planned.decode.block_size)
            sections.append(Section(planned.decode_names.own_blocks, (num_rows, ring)))
            sections += _pair_sections(planned.decode_names, planned.decode, num_rows, num_pairs, has_starts=is_mixed)
        if is_mixed:
            sections += [
                Section("chunk_tile_starts", (num_tiles + 1,)),
                Section("chunk_tile_positions", (num_tiles,)),
                Section("chunk_token_slots", (num_tokens,)),
                *self._spans.sections(num_tokens),
            ]
            for planned in self._planned:
                sections.append(Section(planned.chunk_names.last_pair, (num_tiles,)))
                sections += _pair_sections(
                    planned.chunk_names, planned.chunk, num_tiles, num_chunk_pairs, has_starts=True
                )
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        counted = self._counted
        assert counted.batch is batch
        decodes, num_pairs, is_mixed = counted.decodes, self._dims(size)[1], size.kind == StepKind.MIXED
        self._fill_rows(batch, views)
        for planned, count in zip(self._planned, counted.decode_counts, strict=True):
            table, names = planned.group.block_table, planned.decode_names
            _fill_pairs(planned.decode, *decodes, NO_ENDS, table.table, names, views)
            reach, first, rows = decodes
            own = rows, table.table, table.num_blocks, views[names.own_blocks]
            fill_ring(planned.decode.block_size, first, first + reach, *own)
            levels = planned.decode_names.levels_of(views)
            if is_mixed:
                fill_node_starts(levels, count.per_tile)
            else:
                fill_merge_tree(levels, count.per_tile, num_pairs)
        if is_mixed:
            assert counted.chunks is not None, "a step without chunks runs at a size of decode"
            self._fill_chunks(counted.chunks, counted.chunk_counts, counted.spans, views)

    def _fill_rows(self, batch: InputBatch, views: dict[str, np.ndarray]) -> None:
        """What decode rows have beside plans."""
        rows = batch.num_decodes
        places = views["token_ids"], batch.row_len, batch.num_computed[:rows], views["decode_starts"]
        fill_starts(batch.rows[:rows], *places)
        if batch.row_len > 1:
            pad_into(views[LENGTHS], batch.query_len[:rows], 0)

    def _fill_chunks(
        self, chunks: _Requests, counts: Sequence[PairCount], spans: SpanEnds, views: dict[str, np.ndarray]
    ) -> None:
        self._spans.fill(spans, views)
        for planned, count in zip(self._planned, counts, strict=True):
            names = planned.chunk_names
            _fill_pairs(planned.chunk, *chunks, spans, planned.group.block_table.table, names, views)
            pad_into(views[names.last_pair], count.per_tile.cumsum() - 1, len(views[names.pair_tile]) - 1)
            fill_node_starts(planned.chunk_names.levels_of(views), count.per_tile)
        fill_tiles(
            self.limits.chunk.query,
            *chunks[:2],
            views["chunk_tile_starts"],
            views["chunk_tile_positions"],
            views["chunk_token_slots"],
        )

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        for name, view in views.items():
            if "_pair_start." in name:
                view[:] = FAR

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        return [DeviceStarts(step.views["decode_starts"], batch.rows), *self._growing(batch, step)]

    def _growing(self, batch: InputBatch, step: PackedStep) -> Iterator[RepeatPart]:
        for planned, count in zip(self._planned, self._counted.decode_counts, strict=True):
            names = planned.decode_names
            sections = names.own_blocks, names.pair_tile, names.pair_start, names.pair_blocks, names.levels
            table = planned.group.block_table
            yield GrowingPlan(planned.decode, sections, step, count, table, batch.rows, self.limits)

    # ---- On the device ----

    def bind(self, call: ModelCall) -> None:
        starts = call.arrays["decode_starts"]
        self.bind_rows(call, DecodeRows.of(call, starts, self.limits.decode.query), call.size.kind == StepKind.MIXED)

    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        arrays, tiles = call.arrays, ChunkTiles.of(call, self.limits.chunk.query) if has_chunks else None
        call.positions = rows.positions.reshape(-1)
        num_tokens = call.positions.shape[0]
        if tiles is not None:
            call.positions = torch.cat((call.positions, tiles.positions))
        for planned in self._planned:
            chunks = None
            block_size = planned.decode.block_size
            blocks = rows.own_blocks(arrays[planned.decode_names.own_blocks], block_size)
            if tiles is not None:
                chunks = _chunk_plan(planned, call, tiles, self._spans)
                own = tiles.own_blocks(arrays[planned.chunk_names.last_pair], chunks, planned.chunk)
                blocks = torch.cat((blocks, own))
            metadata = PagedAttentionMetadata(
                slot_blocks=blocks,
                slot_offsets=call.positions % block_size,
                num_decode_tokens=num_tokens,
                decode=_decode_plan(planned, call, rows),
                chunks=chunks,
            )
            call.metadata.update(dict.fromkeys(planned.group.layer_names, metadata))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        self.bind(call)
        traces = {}
        for group in self.groups:
            metadata = call.metadata[group.layer_names[0]]
            layer = trace_plan(metadata, group.block_table.parts)
            traces.update(dict.fromkeys(group.layer_names, layer))
        return traces


def _pair_sections(
    names: _Names, geometry: PairGeometry, num_tiles: int, num_pairs: int, has_starts: bool
) -> list[Section]:
    """Those of one plan; ``has_starts``: of its merge tree where the children of each node start, not each child."""
    levels = zip(names.levels, geometry.level_sizes(num_tiles, num_pairs), strict=True)
    return [
        Section(names.pair_tile, (num_pairs,)),
        Section(names.pair_start, (num_pairs,)),
        Section(names.pair_blocks, (num_pairs, geometry.blocks_per_tile)),
        *(Section(name, (nodes + 1,) if has_starts else (nodes, FAN_IN)) for name, nodes in levels),
    ]


def _fill_pairs(
    geometry: PairGeometry,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    rows: np.ndarray,
    spans: SpanEnds,
    table: np.ndarray,
    names: _Names,
    views: dict[str, np.ndarray],
) -> None:
    fill_pairs(
        geometry.query_tile,
        geometry.kv_tile,
        *geometry.sight,
        query_len,
        num_computed,
        *spans,
        rows,
        table,
        views[names.pair_tile],
        views[names.pair_start],
        views[names.pair_blocks],
    )


def _decode_plan(planned: _Planned, call: ModelCall, rows: DecodeRows) -> PairPlan:
    """A tile is a row; a token is the last that it sees itself."""
    names, arrays = planned.decode_names, call.arrays
    pair_tile, pair_start = arrays[names.pair_tile], arrays[names.pair_start]
    kv_start = pair_start.unsqueeze(1)
    last, first = rows.positions, planned.group.sight.first(rows.positions)
    if rows.is_token is not None:
        last = torch.where(rows.is_token, last, NEVER)
        first = None if first is None else torch.where(rows.is_token, first, FAR)
    return PairPlan(
        block_size=planned.decode.block_size,
        kv_tile=planned.decode.kv_tile,
        pair_tile=pair_tile,
        pair_start=pair_start,
        pair_blocks=arrays[names.pair_blocks],
        last=last[pair_tile] - kv_start,
        first=None if first is None else first[pair_tile] - kv_start,
        merge_tree=_merge_tree(call, names),
    )


def _chunk_plan(planned: _Planned, call: ModelCall, tiles: ChunkTiles, spans: Spans) -> PairPlan:
    names, arrays = planned.chunk_names, call.arrays
    pair_tile, pair_start = arrays[names.pair_tile], arrays[names.pair_start]
    index = torch.arange(tiles.query, dtype=torch.int32, device=pair_tile.device)
    positions = tiles.first.unsqueeze(1) + index
    first, last = planned.group.sight.first(positions), tiles.last_seen(planned.group.sight, positions)
    first, last = spans.widen(arrays, tiles.tokens, first, last)
    kv_start = pair_start.unsqueeze(1)
    if first is not None:
        first = torch.where(tiles.is_token, first, FAR)[pair_tile] - kv_start
    return PairPlan(
        block_size=planned.chunk.block_size,
        kv_tile=planned.chunk.kv_tile,
        pair_tile=pair_tile,
        pair_start=pair_start,
        pair_blocks=arrays[names.pair_blocks],
        last=torch.where(tiles.is_token, last, NEVER)[pair_tile] - kv_start,
        first=first,
        merge_tree=_merge_tree(call, names),
        tile_tokens=tiles.tokens,
        token_slots=tiles.slots,
    )


def _merge_tree(call: ModelCall, names: _Names) -> list[torch.Tensor]:
    levels = names.levels_of(call.arrays)
    if call.size.kind != StepKind.MIXED:
        return list(levels)
    return node_children(levels, call.arrays[names.pair_tile].shape[0])


def node_children(levels: Sequence[torch.Tensor], num_pairs: int) -> list[torch.Tensor]:
    """The merge tree, each level [nodes, FAN_IN], from where the children of each node start, [nodes + 1]."""
    trees, num_below = [], num_pairs
    for starts in levels:
        children = starts[:-1, None] + torch.arange(FAN_IN, dtype=torch.int32, device=starts.device)
        trees.append(torch.where(children < starts[1:, None], children, num_below - 1))
        num_below = len(starts) - 1
    return trees
