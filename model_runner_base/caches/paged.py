"""Attention plans of some groups: counted on the host, packed at a size, and made into metadata in the graph.

Rows are planned token by token, chunks in tiles of many tokens, since a tile reads each key once for all its queries.
The graph works out whatever follows from positions: offsets, seen keys, cache slots.

Example, of the step in step/token_layout.py, with KV tiles of 64 positions for rows and 128 for chunks
(docs/architecture.md has all of it):

    decode_pair_tile   [0, 0, 0, ...]      "a" meets KV tiles 0, 1, 2
    decode_pair_start  [0, 64, 128, FAR, ...]
    decode_own_blocks  [[block 4 of row 4], [0]]  where the key of position 130 goes, with blocks of 32; padding goes
                                           to the null block
    chunk_pair_tile    [0, 1, ...]         both tiles meet KV tile 0
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from model_runner_base.attention.choice import KeyTable, SparseMetadata
from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.plan import (
    FAN_IN,
    FAR,
    KeyRange,
    PairCount,
    PairGeometry,
    PlanUpdates,
    fill_merge_tree,
    fill_node_starts,
    fill_pairs,
)
from model_runner_base.attention.sparse import SparseLatentBackend
from model_runner_base.attention.trace import plan_trace
from model_runner_base.caches.group import AttentionGroup, CacheKind, ModelCaches
from model_runner_base.caches.spans import NO_ENDS, NO_SPANS, BidirectionalSpans, SpanEnds
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import STARTS, ChunkTiles, DecodeRows, ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import Array, PackedStep, Section, pad_into
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.token_layout import PairNeed, Placed, Requests
from model_runner_base.step.trace import LayerTrace


class _Names(NamedTuple):
    """Names of a group's sections of one of its two plans."""

    pair_tile: str
    pair_start: str
    pair_blocks: str
    levels: list[str]
    own_blocks: str
    """Section of the rows' own blocks; only the plan of decode rows has it."""
    last_pair: str
    """Section of each tile's last pair; only the plan of chunk tiles has it."""

    @classmethod
    def of(cls, plan: str, index: int, geometry: PairGeometry) -> "_Names":
        """Names for the group at ``index``; ``plan`` is the name of the plan."""

        def name(part: str) -> str:
            return f"{plan}_{part}.{index}"

        levels = [f"{name('tree')}.{level}" for level in range(geometry.num_levels)]
        pairs = name("pair_tile"), name("pair_start"), name("pair_blocks")
        return cls(*pairs, levels, name("own_blocks"), name("last_pair"))

    def levels_of(self, arrays: dict[str, Array]) -> tuple[Array, ...]:
        return tuple([arrays[level] for level in self.levels])


class _Planned(NamedTuple):
    """A group with the geometries of its two plans, and the names of their sections."""

    group: AttentionGroup
    decode: PairGeometry
    chunk: PairGeometry
    decode_names: _Names
    chunk_names: _Names
    decode_piece: int
    """Largest number of pairs of decode rows that attention holds at a time; 0: all."""
    chunk_piece: int


class _Counted(NamedTuple):
    """Batch that ``need`` was called with, and the pairs of each group; pairs of chunks only in a mixed step."""

    placed: Placed
    decode_counts: list[PairCount]
    chunk_counts: Sequence[PairCount] = ()
    spans: SpanEnds = NO_ENDS


class PlannedCaches(CacheKind):
    """Groups with two plans each, of decode rows and of chunk tiles; ``label`` begins the names of their sections.

    ``spans``: further keys that tokens of chunks see, outside their layer's key range. Steps by whole cache lines are
    not planned here (caches/contiguous.py).
    """

    reads = (STARTS,)

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        limits: StepLimits,
        spans: BidirectionalSpans = NO_SPANS,
        label: str = "",
    ) -> None:
        self.groups = groups
        self._limits = limits
        self._spans = spans
        self._planned = [self._plan_group(group, index, label) for index, group in enumerate(groups)]
        self._counted: _Counted

    def _plan_group(self, group: AttentionGroup, index: int, label: str) -> _Planned:
        limits = self._limits
        decode, chunk = (
            PairGeometry(group.block_table.block_size, query, keys, -(-limits.max_model_len // keys), group.key_range)
            for query, keys in (
                (limits.decode_reach, group.kv_tile),
                (limits.chunk.query, group.chunk_kv_tile),
            )
        )
        names = _Names.of(f"{label}decode", index, decode), _Names.of(f"{label}chunk", index, chunk)
        pieces = limits.decode_pairs_at_once(decode.kv_tile), limits.chunk_pairs_at_once(chunk.kv_tile)
        return _Planned(group, decode, chunk, *names, *pieces)

    # ---- On the host ----

    def need(self, placed: Placed) -> PairNeed:
        """Largest numbers of pairs and tiles that a group has; ``fill`` uses the counts that are made here."""
        batch, decodes, chunks = placed
        decode_counts = [planned.decode.count(*decodes[:2], batch.num_decodes, NO_ENDS) for planned in self._planned]
        decode_pairs = max([count.num_pairs for count in decode_counts], default=0)
        if chunks is None:
            self._counted = _Counted(placed, decode_counts)
            return PairNeed(decode_pairs)
        num_tokens, spans = int(chunks.num_tokens.sum()), self._spans.of_chunks(batch)
        chunk_counts = [
            planned.chunk.count(*chunks[:2], num_tokens, self._spans.seen(spans, planned.group.key_range))
            for planned in self._planned
        ]
        self._counted = _Counted(placed, decode_counts, chunk_counts, spans)
        return PairNeed(
            decode_pairs,
            max([count.num_pairs for count in chunk_counts], default=0),
            max([count.num_tiles for count in chunk_counts], default=0),
        )

    def sections(self, size: StepSize) -> list[Section]:
        if size.kind == StepKind.DECODE_CONTIGUOUS:
            return []
        dims = size.plan_dims()
        sections: list[Section] = []
        # Only plans of pure decode are ever added to, so only their nodes have space for more children.
        is_mixed = size.kind == StepKind.MIXED
        for planned in self._planned:
            ring = ring_size(self._limits.decode_reach, planned.decode.block_size)
            sections.append(Section(planned.decode_names.own_blocks, (dims.decode_rows, ring)))
            of_rows = planned.decode_names, planned.decode, dims.decode_rows, dims.decode_pairs
            sections += _pair_sections(*of_rows, has_starts=is_mixed)
        if is_mixed:
            sections += self._spans.sections(dims.chunk_tokens)
            for planned in self._planned:
                sections.append(Section(planned.chunk_names.last_pair, (dims.chunk_tiles,)))
                of_tiles = planned.chunk_names, planned.chunk, dims.chunk_tiles, dims.chunk_pairs
                sections += _pair_sections(*of_tiles, has_starts=True)
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.DECODE_CONTIGUOUS:
            return
        counted = self._counted
        assert counted.placed.batch is batch
        decodes, num_pairs, is_mixed = (
            counted.placed.decodes,
            size.plan_dims().decode_pairs,
            size.kind == StepKind.MIXED,
        )
        for planned, count in zip(self._planned, counted.decode_counts, strict=True):
            table, names = planned.group.block_table, planned.decode_names
            _fill_pairs(planned.decode, decodes, NO_ENDS, table.table, names, views)
            reach, first, rows = decodes
            own = rows, table.table, table.num_blocks, views[names.own_blocks]
            fill_ring(planned.decode.block_size, first, first + reach, *own)
            levels = planned.decode_names.levels_of(views)
            if is_mixed:
                fill_node_starts(levels, count.per_tile)
            else:
                fill_merge_tree(levels, count.per_tile, num_pairs)
        if is_mixed:
            chunks = counted.placed.chunks
            assert chunks is not None, "a step without chunks runs at a size of decode"
            self._fill_chunks(chunks, counted.chunk_counts, counted.spans, views)

    def _fill_chunks(
        self, chunks: Requests, counts: Sequence[PairCount], spans: SpanEnds, views: dict[str, np.ndarray]
    ) -> None:
        self._spans.fill(spans, views)
        for planned, count in zip(self._planned, counts, strict=True):
            names = planned.chunk_names
            seen = self._spans.seen(spans, planned.group.key_range)
            _fill_pairs(planned.chunk, chunks, seen, planned.group.block_table.table, names, views)
            pad_into(views[names.last_pair], count.per_tile.cumsum() - 1, len(views[names.pair_tile]) - 1)
            fill_node_starts(planned.chunk_names.levels_of(views), count.per_tile)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.DECODE_CONTIGUOUS:
            return
        for planned in self._planned:
            views[planned.decode_names.pair_start][:] = FAR
            if size.kind == StepKind.MIXED:
                views[planned.chunk_names.pair_start][:] = FAR

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater] | None:
        return () if step.size.kind == StepKind.DECODE_CONTIGUOUS else list(self._growing(batch, step))

    def _growing(self, batch: InputBatch, step: PackedStep) -> Iterator[SectionUpdater]:
        for planned, count in zip(self._planned, self._counted.decode_counts, strict=True):
            names = planned.decode_names
            sections = names.own_blocks, names.pair_tile, names.pair_start, names.pair_blocks, names.levels
            table = planned.group.block_table
            yield PlanUpdates(planned.decode, sections, step, count, table, batch.rows, self._limits)

    # ---- On the device ----

    def bind(self, call: ModelCall) -> None:
        if call.size.kind == StepKind.DECODE_CONTIGUOUS:
            return
        arrays, rows, tiles = call.arrays, call.decode_rows, call.tiles
        assert rows is not None
        for planned in self._planned:
            chunks = None
            block_size = planned.decode.block_size
            blocks = blocks_of_rows(rows, arrays[planned.decode_names.own_blocks], block_size)
            if tiles is not None:
                chunks = _chunk_plan(planned, call, tiles, self._spans)
                own = blocks_of_chunks(tiles, arrays[planned.chunk_names.last_pair], chunks, planned.chunk)
                blocks = torch.cat((blocks, own))
            metadata = PagedAttentionMetadata(
                slot_blocks=blocks,
                slot_offsets=call.positions % block_size,
                num_decode_tokens=rows.positions.numel(),
                decode=_decode_plan(planned, call, rows),
                chunks=chunks,
            )
            call.metadata.update(dict.fromkeys(planned.group.layer_names, metadata))

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        self.bind(call)
        return {} if call.size.kind == StepKind.DECODE_CONTIGUOUS else group_traces(self.groups, call)


class PagedCaches(PlannedCaches):
    """Groups whose keys and values stay in blocks that the scheduler gives."""

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = paged_groups(model)
        return cls(groups, model.limits, model.spans) if groups else None


def paged_groups(model: ModelCaches) -> list[AttentionGroup]:
    """Groups that the base plans, of layers with a cache of their own tokens."""
    return [each for each in model.groups if each.reads_plans and not each.key_range.is_whole and not each.cross_len]


def group_traces(groups: Sequence[AttentionGroup], call: ModelCall) -> dict[str, LayerTrace]:
    """Traces of the plans that were bound for the layers of ``groups``."""
    traces = {}
    for group in groups:
        layer = plan_trace(call.metadata[group.layer_names[0]], group.block_table.blocks_per_kv_block)
        traces.update(dict.fromkeys(group.layer_names, layer))
    return traces


def _pair_sections(
    names: _Names, geometry: PairGeometry, num_tiles: int, num_pairs: int, has_starts: bool
) -> list[Section]:
    """Sections of one plan. With ``has_starts``, its merge tree has the start of each node's children, not each
    child."""
    levels = zip(names.levels, geometry.level_sizes(num_tiles, num_pairs), strict=True)
    return [
        Section(names.pair_tile, (num_pairs,)),
        Section(names.pair_start, (num_pairs,)),
        Section(names.pair_blocks, (num_pairs, geometry.blocks_per_tile)),
        *(Section(name, (nodes + 1,) if has_starts else (nodes, FAN_IN)) for name, nodes in levels),
    ]


def _fill_pairs(
    geometry: PairGeometry,
    requests: Requests,
    spans: SpanEnds,
    table: np.ndarray,
    names: _Names,
    views: dict[str, np.ndarray],
) -> None:
    fill_pairs(
        geometry.query_tile,
        geometry.kv_tile,
        *geometry.key_range,
        requests.num_tokens,
        requests.num_computed,
        *spans,
        requests.rows,
        table,
        views[names.pair_tile],
        views[names.pair_start],
        views[names.pair_blocks],
    )


def _decode_plan(planned: _Planned, call: ModelCall, rows: DecodeRows) -> PairPlan:
    """Plan of decode rows: each row is a tile, and the last key that a token sees is its own."""
    names, arrays = planned.decode_names, call.arrays
    pair_tile, pair_start = arrays[names.pair_tile], arrays[names.pair_start]
    kv_start = pair_start.unsqueeze(1)
    last, first = rows.positions, planned.group.key_range.first(rows.positions)
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
        piece=planned.decode_piece,
    )


def _chunk_plan(planned: _Planned, call: ModelCall, tiles: ChunkTiles, spans: BidirectionalSpans) -> PairPlan:
    names, arrays = planned.chunk_names, call.arrays
    pair_tile, pair_start = arrays[names.pair_tile], arrays[names.pair_start]
    index = torch.arange(tiles.query, dtype=torch.int32, device=pair_tile.device)
    positions = tiles.first.unsqueeze(1) + index
    key_range = planned.group.key_range
    first, last = key_range.first(positions), _last_seen(tiles, key_range, positions)
    first, last = spans.widen(arrays, key_range, tiles.tokens, first, last)
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
        tile_slots=tiles.slots,
        piece=planned.chunk_piece,
    )


def _last_seen(tiles: ChunkTiles, key_range: KeyRange, positions: torch.Tensor) -> torch.Tensor:
    """Last position that tokens of each tile at ``positions`` [NT] or [NT, N] see."""
    if not key_range.is_whole:
        return positions
    lengths = tiles.request_lengths().view(-1, *[1] * (positions.dim() - 1))
    return key_range.last_of_whole(positions, lengths)


def _merge_tree(call: ModelCall, names: _Names) -> list[torch.Tensor]:
    levels = names.levels_of(call.arrays)
    if call.size.kind != StepKind.MIXED:
        return list(levels)
    return node_children(levels, call.arrays[names.pair_tile].shape[0])


def node_children(levels: Sequence[torch.Tensor], num_pairs: int) -> list[torch.Tensor]:
    """Merge tree with levels [nodes, FAN_IN], made from the start of each node's children, levels [nodes + 1]."""
    trees, num_below = [], num_pairs
    for starts in levels:
        children = starts[:-1, None] + torch.arange(FAN_IN, dtype=torch.int32, device=starts.device)
        trees.append(torch.where(children < starts[1:, None], children, num_below - 1))
        num_below = len(starts) - 1
    return trees


# ---- Blocks that a step's own tokens are written to ----


def blocks_of_rows(rows: DecodeRows, ring: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R * Q] int32 block of each place of decode rows, the null block where there is no token.

    ``ring`` [R, N] is as ``fill_ring`` writes it.
    """
    if ring.shape[1] == 1:
        blocks = ring.expand_as(rows.positions)
    else:
        blocks = ring.gather(1, (rows.positions // block_size % ring.shape[1]).long())
    if rows.is_token is not None:
        blocks = torch.where(rows.is_token, blocks, 0)
    return blocks.reshape(-1)


def blocks_of_chunks(
    tiles: ChunkTiles, last_pair: torch.Tensor, plan: PairPlan, geometry: PairGeometry
) -> torch.Tensor:
    """[C] int32 block of each token of chunks, the null block for padding; ``last_pair`` [NT] is each tile's last pair.

    A tile's pairs follow each other in the order of their keys.
    """
    tile = tiles.slots // tiles.query
    assert plan.pair_start is not None and plan.pair_blocks is not None
    last_kv_tile = plan.pair_start[last_pair] // geometry.kv_tile
    pair = last_pair[tile] - (last_kv_tile[tile] - tiles.positions // geometry.kv_tile)
    block = plan.pair_blocks[pair.clamp(min=0), tiles.positions % geometry.kv_tile // geometry.block_size]
    return torch.where(tiles.is_real, block, 0)


def ring_size(reach: int, block_size: int) -> int:
    """Largest number of blocks that ``reach`` consecutive positions can touch."""
    return 1 + -(-(reach - 1) // block_size)


@compiled
def fill_ring(
    block_size: int,
    first: np.ndarray,
    stop: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    num_blocks: np.ndarray,
    ring: np.ndarray,
) -> None:
    """Writes the blocks of positions from ``first`` [R] to before ``stop`` [R] to a ring for each row, [R, N], padded.

    Block b of a row is at place b % N of its ring; places without a block hold the null block.

    Example, with blocks of 16 and N = 2: positions 28 to 34 are in blocks 1 and 2 of a row that has [7, 9, 4]; its ring
    is [4, 9].
    """
    size = ring.shape[1]
    for index in range(len(rows)):
        row = rows[index]
        for place in range(size):
            ring[index, place] = 0
        for block in range(first[index] // block_size, (stop[index] - 1) // block_size + 1):
            if block < num_blocks[row]:
                ring[index, block % size] = table[row, block]
    ring[len(rows) :] = 0


class ChosenCaches(CacheKind):
    """Kind of layers that see what an indexer chose (sparse attention, DSA); called after the kind that plans them.

    Latents and an indexer's keys are in blocks of the same ids, and in one attention group, so ``PagedCaches`` plans
    both. This kind adds tables of the keys by position, which all indexers of a step read (attention/choice.py). It
    sends nothing: the tables are made of the plans on the device.
    """

    def __init__(self, groups: Sequence[AttentionGroup], max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = [group for group in paged_groups(model) if issubclass(group.backend, SparseLatentBackend)]
        return cls(groups, model.limits.max_model_len) if groups else None

    def bind(self, call: ModelCall) -> None:
        for group in self._groups:
            metadata = self._metadata(call.metadata[group.layer_names[0]])
            call.metadata.update(dict.fromkeys(group.layer_names, metadata))

    def _metadata(self, planned: PagedAttentionMetadata) -> SparseMetadata:
        rows = chunks = None
        if planned.decode is not None:
            num_rows = planned.num_decode_tokens // planned.decode.last.shape[1]
            rows = KeyTable.of(planned.decode, num_rows, self._max_model_len)
        if planned.chunks is not None:
            assert planned.chunks.tile_tokens is not None
            chunks = KeyTable.of(planned.chunks, len(planned.chunks.tile_tokens), self._max_model_len)
        return SparseMetadata(planned, rows, chunks)

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        return {}
