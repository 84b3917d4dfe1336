"""Layout of a step's tokens, which all kinds of caches share: the interface, and the layout that attention plans read.

A model has one layout. ``RowsAndTiles`` has decode rows and tiles of chunks, each padded by itself, as attention plans
read them; ``request_layout.py`` has tokens request after request, as kernels of other backends do.

In ``RowsAndTiles``, first come the decode rows, padded to ``decode_rows``; then the tokens of chunks, padded to
``chunk_tokens``, in tiles of tokens that follow each other in one request.

Example: "a" in decode at position 130 (row 4), "b" with 100 tokens of its prompt, none of them computed; chunk tiles
of 64 tokens; run at 2 decode rows and 128 chunk tokens. What is packed:

    decode_starts        [-5, 0]        row 4's position is on the device; padding
    chunk_tile_starts    [0, 64, 100, ...]  tokens 0 to 63 and 64 to 99 of the chunks are a tile each
    chunk_tile_positions [0, 64, ...]
    chunk_tile_slots     [0, 1, ..., 99, 0, ...]  where in the flattened tiles each token lies
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from model_runner_base.step.batch import BatchOrder, InputBatch
from model_runner_base.step.call import (
    LENGTHS,
    STARTS,
    TILE_POSITIONS,
    TILE_SLOTS,
    TILE_STARTS,
    ChunkTiles,
    DecodeRows,
    ModelCall,
)
from model_runner_base.step.components import SectionUpdater, StepComponent
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize


class TokenLayout(StepComponent, ABC):
    """Component before the caches. It has a step's sizes, the order of requests, and in the graph every token's
    position."""

    order: BatchOrder
    limits: StepLimits
    reads: ClassVar[tuple[str, ...]] = ("token_ids",)

    @abstractmethod
    def needs(self, batch: InputBatch) -> list[StepSize]:
        """Sizes of this step before padding, one for each way to run it; there is at least one."""

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        """Index of the first token of chunks, after ``num_decode_tokens`` of decode rows and their padding."""
        return num_decode_tokens

    @abstractmethod
    def bind(self, call: ModelCall) -> None:
        """Sets the call's ``positions`` and the other fields that ``ModelCall`` leaves to the layout. Part of the
        graph."""

    @abstractmethod
    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        """Does as ``bind`` for a pass of drafting: decode rows [R, Q] of any number of tokens, at positions that the
        step may touch, followed by the step's chunks or by none."""


class DeviceStarts:
    """Upkeep of the section that says where rows start: while their step is repeated, only the device knows."""

    def __init__(self, starts: np.ndarray, rows: np.ndarray) -> None:
        self._starts = starts
        self._rows = rows

    def begin(self, positions: np.ndarray) -> None:
        self._starts[: len(self._rows)] = -self._rows - 1

    def advance(self, positions: np.ndarray) -> bool:
        return True


class Requests(NamedTuple):
    """Part of a batch's requests, R of them."""

    num_tokens: np.ndarray
    """[R] number of new tokens; of a decode row, the number of positions that it may touch."""
    num_computed: np.ndarray
    """[R] number of tokens in the cache; of a decode row, the first position that it may touch."""
    rows: np.ndarray
    """[R] row of each request in the request states."""


class Placed(NamedTuple):
    """Requests of a batch, split by how their tokens lie: decode rows and chunks."""

    batch: InputBatch
    decodes: Requests
    chunks: Requests | None
    """Requests with a chunk; None in a step of pure decode."""


class PairNeed(NamedTuple):
    """Numbers of a step's size that a plan needs, padding not counted."""

    decode_pairs: int = 0
    chunk_pairs: int = 0
    chunk_tiles: int = 0


class Planner(Protocol):
    """Methods of a kind of caches that the layout calls."""

    def need(self, placed: Placed) -> PairNeed: ...

    def other_sizes(self, batch: InputBatch) -> list[StepSize]: ...


class RowsAndTiles(TokenLayout):
    """Layout of steps with attention plans; ``kinds`` say how many pairs a step needs."""

    def __init__(self, limits: StepLimits, kinds: Sequence[Planner]) -> None:
        self.limits = limits
        self.order = BatchOrder(limits.decode.query, decode_query_len=limits.decode.query)
        self._kinds = kinds

    # ---- On the host ----

    def needs(self, batch: InputBatch) -> list[StepSize]:
        num_rows, chunks = batch.num_decodes, None
        if not batch.is_decode:
            chunks = Requests(batch.query_len[num_rows:], batch.num_computed[num_rows:], batch.rows[num_rows:])
        placed = Placed(batch, self._reach_of(batch), chunks)
        needs = [kind.need(placed) for kind in self._kinds]
        pairs, chunk_pairs, tiles = needs[0] if len(needs) == 1 else map(max, zip(PairNeed(), *needs, strict=True))
        if chunks is None:
            size = self.limits.decode_size(num_rows, pairs)
        else:
            num_chunks, num_tokens = batch.num_reqs - num_rows, int(chunks.num_tokens.sum())
            # Kinds without plans count no tiles.
            tiles = tiles or int((-(-chunks.num_tokens // self.limits.chunk.query)).sum())
            size = self.limits.mixed_size(num_rows, pairs, num_tokens, num_chunks, chunk_pairs, tiles)
        return [size, *(other for kind in self._kinds for other in kind.other_sizes(batch))]

    def _reach_of(self, batch: InputBatch) -> Requests:
        """Decode rows, with the number of positions that each may touch in this step, and the first of them."""
        limits, num_rows = self.limits, batch.num_decodes
        query_len, num_computed = batch.query_len[:num_rows], batch.num_computed[:num_rows]
        if limits.decode_reach > 1:
            stop = np.minimum(num_computed + query_len + limits.ahead, limits.max_model_len)
            num_computed = np.maximum(num_computed - limits.unread, 0)
            query_len = stop - num_computed
        return Requests(query_len, num_computed, batch.rows[:num_rows])

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        if size.kind != StepKind.MIXED:
            return num_decode_tokens
        return size.plan_dims().decode_rows * self.limits.decode.query

    def sections(self, size: StepSize) -> list[Section]:
        dims = size.plan_dims()
        sections = [Section(STARTS, (dims.decode_rows,))]
        if self.limits.decode.query > 1:
            sections.append(Section(LENGTHS, (dims.decode_rows,)))
        if size.kind == StepKind.MIXED:
            sections += [
                Section(TILE_STARTS, (dims.chunk_tiles + 1,)),
                Section(TILE_POSITIONS, (dims.chunk_tiles,)),
                Section(TILE_SLOTS, (dims.chunk_tokens,)),
            ]
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        rows = batch.num_decodes
        places = views["token_ids"], batch.decode_query_len, batch.num_computed[:rows], views[STARTS]
        fill_starts(batch.rows[:rows], *places)
        if batch.decode_query_len > 1:
            pad_into(views[LENGTHS], batch.query_len[:rows], 0)
        if size.kind == StepKind.MIXED:
            chunks = batch.query_len[rows:], batch.num_computed[rows:]
            sections = views[TILE_STARTS], views[TILE_POSITIONS], views[TILE_SLOTS]
            fill_tiles(self.limits.chunk.query, *chunks, *sections)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return [DeviceStarts(step.views[STARTS], batch.rows)]

    # ---- On the device ----

    def bind(self, call: ModelCall) -> None:
        rows = DecodeRows.of(call.arrays, call.row_computed, self.limits.decode.query)
        self.bind_rows(call, rows, call.size.kind == StepKind.MIXED)

    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        call.decode_rows, call.has_chunks = rows, has_chunks
        call.positions = rows.positions.reshape(-1)
        if has_chunks:
            call.tiles = ChunkTiles.of(call.arrays, self.limits.chunk.query)
            call.positions = torch.cat((call.positions, call.tiles.positions))


@compiled
def fill_starts(
    rows: np.ndarray, token_ids: np.ndarray, decode_query_len: int, num_computed: np.ndarray, starts: np.ndarray
) -> None:
    """Writes the start position of each of R decode rows of ``decode_query_len`` tokens; padding starts at 0.

    If only the device knows a row's first token, only the device knows its position (``known_or``).
    """
    for index in range(len(rows)):
        starts[index] = -rows[index] - 1 if token_ids[index * decode_query_len] < 0 else num_computed[index]
    starts[len(rows) :] = 0


@compiled
def fill_tiles(
    query_tile: int,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    tile_starts: np.ndarray,
    tile_positions: np.ndarray,
    tile_slots: np.ndarray,
) -> None:
    """Writes each chunk tile's first token [NT + 1] and that token's position [NT], and each token's place in the
    tiles.

    A tile ends where the next one begins; padding tiles are empty. Places are counted in the flattened tiles.
    """
    tile = token = 0
    for request in range(len(query_len)):
        length = query_len[request]
        for first in range(0, length, query_tile):
            tile_starts[tile] = token
            tile_positions[tile] = num_computed[request] + first
            for index in range(min(query_tile, length - first)):
                tile_slots[token] = tile * query_tile + index
                token += 1
            tile += 1
    tile_starts[tile:] = token
    tile_positions[tile:] = 0
    tile_slots[token:] = 0
