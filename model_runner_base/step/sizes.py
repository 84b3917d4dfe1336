"""Size of a step: its kind, and the numbers that a device has to know in advance.

Each number is a dim (``Dim``). Every step has the dims tokens, requests and logits rows. Kinds of caches add others,
such as the attention pairs of a plan. A device captures or compiles one graph for each size of a list, and a step is
padded to a size that holds it.

Example, with dims (tokens, requests, logits, decode_rows, decode_pairs, chunk_tokens, chunk_tiles, chunk_pairs): three
requests in decode and a prompt of 100 tokens need ``StepSize(MIXED, (103, 4, 4, 3, 8, 100, 2, 4))``. They may run at
``StepSize(MIXED, (136, 16, 16, 8, 33, 128, 4, 9))``. Both numbers of pairs include one that is always padding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from model_runner_base.step.host_loops import compiled


class StepKind(IntEnum):
    """Kinds of steps whose graphs differ in more than padding."""

    DECODE = 0
    """Step in which every request has a decode row."""
    MIXED = 1
    """Step of decode rows and chunks of prompts."""
    DECODE_CONTIGUOUS = 2
    """Step of decode rows that reads every line of a contiguous cache, used or not (caches/contiguous.py)."""

    __hash__ = int.__hash__  # Enum's own is a Python function, which is slow: sizes are looked up in every step.

    def __str__(self) -> str:
        return ("decode", "mixed", "decode by cache lines")[self]


class Dim(NamedTuple):
    """One number of a size."""

    name: str
    costs: tuple[float, float, float]
    """Cost of one unit of this number in each kind of step, in units of one token; only to compare sizes."""


COMMON_DIMS = (
    Dim("tokens", (1.0, 1.0, 1.0)),
    Dim("requests", (0.2, 0.2, 0.2)),
    Dim("logits", (0.0, 0.0, 0.0)),
)
"""Dims of every step. ``logits`` are logits rows: one for each request, more where drafts are verified."""


class PlanDims(NamedTuple):
    """Dims that attention plans add to those of every step."""

    decode_rows: int
    decode_pairs: int
    chunk_tokens: int
    chunk_tiles: int
    chunk_pairs: int


PLANNED = (*(dim.name for dim in COMMON_DIMS), *PlanDims._fields)


class StepSize(NamedTuple):
    """Size of one step. ``dims`` are in the order of ``StepLimits.dims``: tokens, requests and logits come first."""

    kind: StepKind
    dims: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.dims[0]

    @property
    def num_reqs(self) -> int:
        return self.dims[1]

    @property
    def num_logits(self) -> int:
        return self.dims[2]

    def plan_dims(self) -> PlanDims:
        """Dims of a step with attention plans. No property, since Dynamo would not look into one."""
        return PlanDims(*self.dims[3:8])

    def holds(self, need: "StepSize") -> bool:
        """Whether a step of size ``need`` can be padded to this size."""
        return self.kind == need.kind and all(a >= b for a, b in zip(self.dims, need.dims, strict=True))

    def as_row(self) -> tuple[int, ...]:
        """The kind and the dims as numbers, for tables of sizes."""
        return int(self.kind), *self.dims

    def __str__(self) -> str:
        others = f", {' + '.join(map(str, self.dims[3:]))}" if self.dims[3:] else ""
        return f"{self.kind} {self.num_tokens} tokens, {self.num_reqs} requests{others}"


class Tiling(NamedTuple):
    """Sizes of the query tiles and KV tiles that attention pairs up."""

    query: int
    """Number of query tokens in a tile."""
    keys: int
    """Number of cache positions in a KV tile."""


@dataclass(frozen=True)
class StepLimits:
    """Limits on what the scheduler may ask of one step, and the tilings that attention plans use."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    decode: Tiling
    """Tiling of decode rows: ``query`` is the most tokens that a decode row has."""
    chunk: Tiling
    """Tiling of chunks of prompts."""
    dims: tuple[Dim, ...] = COMMON_DIMS
    num_lines: int = 0
    """Number of lines of a contiguous cache, if decode may read all of them; else 0."""
    unread: int = 0
    """Number of tokens by which the scheduler may overstate a decode row's progress: drafts whose verification it has
    not read yet."""
    ahead: int = 0
    """Number of positions after a decode row's tokens that drafting may reach."""

    pass_tokens: int = 1
    """Largest number of tokens of a decode row that the model, or a draft model, takes at a time."""
    cross_len: int = 0
    """Number of keys of an encoder's output that each token sees in cross-attention layers; 0: there are none."""
    max_arrivals: int | None = None
    """Largest number of requests that may have a chunk in one step, each with its whole prompt; None: any request may
    have a chunk of any part of its prompt."""

    decode_piece: int = 0
    """Largest number of pairs of decode rows that attention in plain torch holds at a time (attention/pieces.py); 0:
    all."""
    chunk_piece: int = 0
    """Largest number of pairs of chunk tiles that attention in plain torch holds at a time; 0: all."""
    decodes: bool = True
    """Whether requests decode; False: all tokens are of prompts, so that a step has no decode rows."""

    @property
    def max_chunks(self) -> int:
        """Largest number of requests that may have a chunk in one step."""
        return self.max_num_reqs if self.max_arrivals is None else min(self.max_arrivals, self.max_num_reqs)

    @property
    def max_chunk_tokens(self) -> int:
        """Largest number of tokens that the chunks of one step may have together."""
        most = self.max_num_tokens
        return most if self.max_arrivals is None else min(most, self.max_chunks * self.max_model_len)

    @property
    def decode_reach(self) -> int:
        """Number of positions that a decode row may touch in one step. There may be more than it has tokens: the host
        does not know its exact position, and drafting reaches further."""
        return self.unread + self.decode.query + self.ahead

    @property
    def longest_row(self) -> int:
        """Largest number of tokens of a decode row that a pass takes; one of drafting may take more than a step."""
        return max(self.decode.query, self.pass_tokens)

    def decode_pairs_at_once(self, kv_tile: int) -> int:
        """``decode_piece`` for KV tiles of ``kv_tile`` positions, which may be more than ``decode.keys``."""
        return _pairs_of(self.decode_piece, self.decode.keys, kv_tile)

    def chunk_pairs_at_once(self, kv_tile: int) -> int:
        """``chunk_piece`` for KV tiles of ``kv_tile`` positions, which may be more than ``chunk.keys``."""
        return _pairs_of(self.chunk_piece, self.chunk.keys, kv_tile)

    @property
    def max_kv_tiles(self) -> int:
        """Largest number of KV tiles of a decode row."""
        return -(-self.max_model_len // self.decode.keys)

    @property
    def max_chunk_kv_tiles(self) -> int:
        return -(-self.max_model_len // self.chunk.keys)

    def cross_pairs(self, size: StepSize) -> dict[str, int]:
        """Number of attention pairs of a cross-attention layer, by names of dims. Each row or tile meets all keys of
        the encoder's output."""
        dims = self.named(size)
        return {
            "decode_pairs": dims["decode_rows"] * -(-self.cross_len // self.decode.keys),
            "chunk_pairs": dims["chunk_tiles"] * -(-self.cross_len // self.chunk.keys),
        }

    def size(self, kind: StepKind, **dims: int) -> StepSize:
        """A size from dims by name. Dims that are left out are 0; names that these limits do not have are ignored."""
        return StepSize(kind, tuple([dims.get(name, 0) for name in self._names]))

    def but(self, size: StepSize, **dims: int) -> StepSize:
        """A copy of a size with some dims changed, by name."""
        return self.size(size.kind, **(self.named(size) | dims))

    @cached_property
    def _names(self) -> list[str]:
        return [dim.name for dim in self.dims]

    def named(self, size: StepSize) -> dict[str, int]:
        """The dims of a size by name; 0 for names that these limits do not have."""
        return defaultdict(int, zip(self._names, size.dims, strict=True))

    @cached_property
    def _pick(self) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """Function that picks the dims of a size from the numbers of PLANNED, followed by a 0 for any other dim.

        Every step calls it, and a dictionary by names takes five times as long.
        """
        places = [PLANNED.index(name) if name in PLANNED else len(PLANNED) for name in self._names]
        return itemgetter(*places)

    def decode_size(self, num_rows: int, num_pairs: int) -> StepSize:
        """Size of a step of decode rows with ``num_pairs`` pairs, and one neutral pair: it stays padding."""
        tokens = num_rows * self.decode.query
        return StepSize(StepKind.DECODE, self._pick((tokens, num_rows, tokens, num_rows, num_pairs + 1, 0, 0, 0, 0)))

    def mixed_size(
        self, num_rows: int, num_pairs: int, chunk_tokens: int, num_chunks: int, chunk_pairs: int, num_tiles: int = 0
    ) -> StepSize:
        """Size of a step of decode rows and chunks, each with one neutral pair in addition.

        If ``num_tiles`` is 0, there are as many tiles as the chunks may take. There is at least one decode row, which
        may be padding, so that no array of a graph is empty.
        """
        num_logits = num_rows * self.decode.query + num_chunks
        num_rows = max(1, num_rows)
        tokens = num_rows * self.decode.query
        planned = (
            tokens + chunk_tokens,
            min(num_rows + num_chunks, self.max_num_reqs),
            min(max(num_logits, tokens), self.max_num_reqs * self.decode.query),
            num_rows,
            num_pairs + 1,
            chunk_tokens,
            num_tiles or self.num_tiles(chunk_tokens, num_chunks),
            chunk_pairs + 1,
            0,
        )
        return StepSize(StepKind.MIXED, self._pick(planned))

    def num_tiles(self, num_tokens: int, num_chunks: int) -> int:
        """Largest number of query tiles of ``num_chunks`` chunks that have ``num_tokens`` tokens in all. Each chunk's
        last tile may be partly filled."""
        return num_tokens // self.chunk.query + min(num_chunks, num_tokens)

    def in_two_pieces(self, size: StepSize) -> StepSize:
        """``size`` with no more pairs than attention works through in two pieces."""
        dims = self.named(size)
        pieces = {"decode_pairs": self.decode_piece, "chunk_pairs": self.chunk_piece}
        return self.but(size, **{name: min(dims[name], 2 * piece) for name, piece in pieces.items() if piece})

    @property
    def smallest_size(self) -> StepSize:
        """Size of a step of one token, with one attention pair."""
        return self.decode_size(1, 1) if self.decodes else self.mixed_size(0, 0, 1, 1, 1)

    @property
    def largest_sizes(self) -> tuple[StepSize, ...]:
        """The largest step of pure decode and the largest mixed step: no step needs more memory. If no request decodes,
        the mixed step alone.

        In the mixed step, each request may have a decode row, ``max_chunks`` requests may have a chunk, and
        ``max_chunk_tokens`` tokens may be in chunks.
        """
        num_rows, chunks, tokens = self.max_num_reqs, self.max_chunks, self.max_chunk_tokens
        pairs, tiles = num_rows * self.max_kv_tiles, self.num_tiles(tokens, chunks)
        chunk_pairs = tiles * self.max_chunk_kv_tiles
        if not self.decodes:
            return (self.mixed_size(0, 0, tokens, chunks, chunk_pairs),)
        return self.decode_size(num_rows, pairs), self.mixed_size(num_rows, pairs, tokens, chunks, chunk_pairs)


def _pairs_of(piece: int, keys: int, kv_tile: int) -> int:
    """Number of pairs with tiles of ``kv_tile`` positions that are as large as ``piece`` pairs of ``keys``; 0 for 0."""
    return max(1, piece * keys // kv_tile) if piece else 0


@compiled
def first_that_holds(sizes: np.ndarray, kind: int, dims: tuple[int, ...]) -> int:
    """Index of the first row of ``sizes`` [N, 1 + dims] int32 that holds a step of this kind and these dims, or -1.

    ``StepSize.holds`` has the rule.
    """
    for index in range(len(sizes)):
        if sizes[index, 0] == kind:
            holds = True
            for dim in range(len(dims) - 1, -1, -1):
                if sizes[index, 1 + dim] < dims[dim]:
                    holds = False
                    break
            if holds:
                return index
    return -1


def cost_of(sizes: np.ndarray, dims: Iterable[Dim]) -> np.ndarray:
    """Costs of steps of these sizes, rows [..., 1 + dims], in units of one token; only to compare them."""
    weights = np.array([dim.costs for dim in dims]).T
    return (sizes[..., 1:] * weights[sizes[..., 0]]).sum(axis=-1)


def geometric(start: int, stop: int, factor: int = 2) -> list[int]:
    """``start``, ``start * factor``, ... below ``stop``, then ``stop`` itself."""
    values = []
    value = min(start, stop)
    while value < stop:
        values.append(value)
        value *= factor
    return [*values, stop]
