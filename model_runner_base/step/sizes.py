"""How large a step is: its kind, and one number for everything that a device has to know ahead.

A size has a dim for each number: tokens, requests and rows of logits, which every step has, and those that the kinds of
KV-cache groups contribute (``Dim``), such as the attention pairs of a plan. Captured device graphs and compiled buckets
are sizes; a step is padded to one that holds it.

Example, with dims (tokens, requests, logits, decode_rows, decode_pairs, chunk_tokens, chunk_tiles, chunk_pairs): three
requests in decode beside a prompt of 100 tokens need ``StepSize(MIXED, (103, 4, 4, 3, 8, 100, 2, 4))``; they may run at
``StepSize(MIXED, (136, 16, 16, 8, 33, 128, 4, 9))``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from model_runner_base.host_loops import compiled


class StepKind(IntEnum):
    """What tells apart graphs that no padding makes alike."""

    DECODE = 0
    """Every request has a decode row."""
    MIXED = 1
    """Decode rows and chunks of prompts."""
    DECODE_CONTIGUOUS = 2
    """Decode that reads every line of a contiguous cache, used or not (caches/contiguous_decode.py)."""

    __hash__ = int.__hash__  # An enum's own is a Python function; sizes are looked up in every step.

    def __str__(self) -> str:
        return ("decode", "mixed", "decode by cache lines")[self]


class Dim(NamedTuple):
    """One number of a size."""

    name: str
    costs: tuple[float, float, float]
    """What one of it costs in each kind of step, in units of one token; only to compare sizes."""


COMMON_DIMS = (
    Dim("tokens", (1.0, 1.0, 1.0)),
    Dim("requests", (0.2, 0.2, 0.2)),
    Dim("logits", (0.0, 0.0, 0.0)),
)
"""Those of every step. ``logits`` are rows of logits: one a request, more where drafts are verified."""


PLAN_DIMS = ("decode_rows", "decode_pairs", "chunk_tokens", "chunk_tiles", "chunk_pairs")
"""The dims of a step with attention plans, behind those of every step."""
PLANNED = (*(dim.name for dim in COMMON_DIMS), *PLAN_DIMS)


class StepSize(NamedTuple):
    """The static sizes of one step; ``dims`` in the order of ``StepLimits.dims``: tokens, requests, logits first."""

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

    def plan_dims(self) -> tuple[int, ...]:
        """Numbers of ``PLAN_DIMS``, of a step with attention plans: no property, which Dynamo would not look into."""
        return self.dims[3:8]

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
    """How attention is cut: a tile of queries meets tiles of keys."""

    query: int
    """Query tokens in a tile."""
    keys: int
    """Cache positions in a KV tile."""


@dataclass(frozen=True)
class StepLimits:
    """What the scheduler may ask of one step, and the tilings that attention plans will use."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    decode: Tiling
    """Of decode rows: ``query`` is the most tokens that a row of decode has."""
    chunk: Tiling
    """Of chunks of prompts."""
    dims: tuple[Dim, ...] = COMMON_DIMS
    num_lines: int = 0
    """Lines of a contiguous cache, if decode may read all of them; else 0."""
    unread: int = 0
    """Tokens by which the scheduler may overstate a decode row's progress: drafts whose fate it has not read yet."""
    ahead: int = 0
    """Positions behind a decode row's tokens that drafting runs ahead to."""

    pass_tokens: int = 1
    """The most tokens of a decode row that the model or what drafts takes at a time."""
    cross_len: int = 0
    """Keys of an encoder's output that each token sees in cross-attention layers; 0: there are none."""
    max_arrivals: int | None = None
    """Requests that may have a chunk in one step, where those are fewer than all: each has a whole prompt then."""

    @property
    def max_chunks(self) -> int:
        """Requests that may have a chunk in one step."""
        return self.max_num_reqs if self.max_arrivals is None else min(self.max_arrivals, self.max_num_reqs)

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens that the chunks of one step may have together."""
        most = self.max_num_tokens
        return most if self.max_arrivals is None else min(most, self.max_chunks * self.max_model_len)

    @property
    def decode_reach(self) -> int:
        """Positions that a decode row may touch in one step, wherever it truly is."""
        return self.unread + self.decode.query + self.ahead

    @property
    def max_kv_tiles(self) -> int:
        """Of a decode row."""
        return -(-self.max_model_len // self.decode.keys)

    @property
    def max_chunk_kv_tiles(self) -> int:
        return -(-self.max_model_len // self.chunk.keys)

    def cross_pairs(self, size: StepSize) -> dict[str, int]:
        """Attention pairs of a cross-attention layer, by the names of dims: any row or tile meets all of the keys."""
        dims = self.named(size)
        return {
            "decode_pairs": dims["decode_rows"] * -(-self.cross_len // self.decode.keys),
            "chunk_pairs": dims["chunk_tiles"] * -(-self.cross_len // self.chunk.keys),
        }

    def size(self, kind: StepKind, **dims: int) -> StepSize:
        """By the names of dims; those that are left out are 0, names that are none of these limits' are ignored."""
        return StepSize(kind, tuple([dims.get(name, 0) for name in self._names]))

    def but(self, size: StepSize, **dims: int) -> StepSize:
        """A size with some dims changed, by name."""
        return self.size(size.kind, **(self.named(size) | dims))

    @cached_property
    def _names(self) -> list[str]:
        return [dim.name for dim in self.dims]

    def named(self, size: StepSize) -> dict[str, int]:
        """The dims of a size by name; 0 for names that are none of these limits'."""
        return defaultdict(int, zip(self._names, size.dims, strict=True))

    @cached_property
    def _pick(self) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """From the numbers of PLANNED and a 0, which stands for any other dim, to the dims of a size.

        Every step asks for one, and a dictionary by names takes five times as long.
        """
        places = [PLANNED.index(name) if name in PLANNED else len(PLANNED) for name in self._names]
        return itemgetter(*places)

    def decode_size(self, num_rows: int, num_pairs: int) -> StepSize:
        """Of rows of decode, and a neutral pair beside ``num_pairs``."""
        tokens = num_rows * self.decode.query
        return StepSize(StepKind.DECODE, self._pick((tokens, num_rows, tokens, num_rows, num_pairs + 1, 0, 0, 0, 0)))

    def mixed_size(
        self, num_rows: int, num_pairs: int, chunk_tokens: int, num_chunks: int, chunk_pairs: int, num_tiles: int = 0
    ) -> StepSize:
        """Of rows of decode beside chunks, with a neutral pair each; of ``num_tiles``, or as many as they may take.

        There is a row of padding at least, so that no array of a graph is empty.
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
        """The most query tiles that chunks of so many tokens in all can make: each may leave one ragged."""
        return num_tokens // self.chunk.query + min(num_chunks, num_tokens)

    @property
    def largest_sizes(self) -> tuple[StepSize, StepSize]:
        """The largest step of pure decode and the largest mixed step: no step needs more memory.

        Any request of a mixed step may have a decode row, any a chunk unless ``max_arrivals`` are fewer, and any token
        may be a chunk's.
        """
        rows, chunks, tokens = self.max_num_reqs, self.max_chunks, self.max_chunk_tokens
        pairs, tiles = rows * self.max_kv_tiles, self.num_tiles(tokens, chunks)
        chunk_pairs = tiles * self.max_chunk_kv_tiles
        return self.decode_size(rows, pairs), self.mixed_size(rows, pairs, tokens, chunks, chunk_pairs)


@compiled
def first_that_holds(sizes: np.ndarray, kind: int, dims: tuple[int, ...]) -> int:
    """The first row of ``sizes`` [N, 1 + dims] int32 that ``StepSize.holds`` a need of this kind and dims, or -1."""
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
    """What steps of these sizes, rows [..., 1 + dims], cost in units of one token; only to compare them."""
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
