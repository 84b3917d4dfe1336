"""Which step sizes a device runs at, and how a step is padded to one of them.

Captured device graphs and compiled buckets are one idea here: a list of sizes that are captured ahead, one dispatch
that picks the cheapest size a step fits in, and padding up to it. The default policy is eager: every step runs at the
size it has and nothing is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from model_runner_base.host_loops import compiled

WHOLE_LINES = 0
WHOLE_LINES_COST = 0.75
"""Of a KV tile that is read in its line, in those that are gathered; measured (docs/kv_cache.md)."""


class GraphSize(NamedTuple):
    """The static sizes of one step.

    ``query_tile`` tells the kinds of step apart: 1 means that every request has one token (uniform decode), more means
    that prefill chunks and decodes are mixed. WHOLE_LINES is uniform decode that reads a contiguous cache line by line,
    whether a line is in use or not (attention/lines.py): its tiles are the lines, its pairs their KV tiles up to the
    longest context.
    """

    query_tile: int
    """Query tokens in one attention tile, or WHOLE_LINES."""
    num_tokens: int
    num_reqs: int
    """Rows of logits."""
    num_tiles: int
    """Query tiles of the attention plan."""
    num_pairs: int
    """(query tile, KV tile) pairs of the attention plan, of which at least one is padding."""

    def holds(self, need: "GraphSize") -> bool:
        """Whether a step of size ``need`` can be padded to this size."""
        return self.query_tile == need.query_tile and all(a >= b for a, b in zip(self, need, strict=True))

    def __str__(self) -> str:
        kind = {1: "decode", WHOLE_LINES: "decode by cache lines"}.get(self.query_tile, "mixed")
        return f"{kind} {self.num_tokens} tokens, {self.num_reqs} requests, {self.num_pairs} attention pairs"


@dataclass(frozen=True)
class StepLimits:
    """What the scheduler may ask of one step, and the tiling that the attention plan will use."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    query_tile: int
    """Query tile of mixed steps."""
    kv_tile: int
    num_lines: int = 0
    """Lines of a contiguous cache, if decode may read all of them; else 0."""

    @property
    def max_kv_tiles(self) -> int:
        return -(-self.max_model_len // self.kv_tile)

    def num_tiles(self, num_tokens: int) -> int:
        """The most query tiles ``num_tokens`` tokens of a mixed step can make: each request may leave one ragged."""
        ragged = min(self.max_num_reqs, num_tokens)
        return num_tokens // self.query_tile + ragged

    @property
    def largest_sizes(self) -> tuple[GraphSize, GraphSize]:
        """The largest step of pure decode and the largest mixed step: no step needs more memory."""
        tokens, reqs, tiles = self.max_num_tokens, self.max_num_reqs, self.num_tiles(self.max_num_tokens)
        return (
            GraphSize(1, reqs, reqs, reqs, reqs * self.max_kv_tiles + 1),
            GraphSize(self.query_tile, tokens, reqs, tiles, tiles * self.max_kv_tiles + 1),
        )

    @property
    def line_sizes(self) -> list[GraphSize]:
        """Decode by whole cache lines: all requests, contexts of 4, 6, 8, 12, 16, ... KV tiles; shorter ones gain
        nothing.
        """
        reqs = min(self.max_num_reqs, self.num_lines)
        tiles = geometric(4, self.max_kv_tiles) + geometric(6, self.max_kv_tiles)
        lines = self.num_lines
        return [GraphSize(WHOLE_LINES, reqs, reqs, lines, lines * count) for count in sorted(set(tiles)) if lines]


@dataclass(frozen=True)
class SortLimits:
    """What a device's graphs may sort. By default anything: tokens are drawn from the whole vocabulary, exactly."""

    max_candidates: int | None = None
    """A token is drawn among so many likeliest of its row, at most; None: among all. Where several tie for the last
    place, all of them are candidates."""
    max_width: int | None = None
    """The longest row that the largest numbers are searched in at a time; None: any."""


StepFunction = Callable[..., Any]
WrapFunction = Callable[[StepFunction, list[torch.Tensor]], StepFunction]
"""``GraphPolicy.wrap``, as it is handed to the rooms that have functions of their own."""


class NoGraphSizeError(RuntimeError):
    """A step is larger than every captured size; it is a fault of the policy, not of the request."""


class GraphPolicy:
    """Eager: no sizes, no padding beyond the plan's neutral pair, functions run as they are."""

    sizes: Sequence[GraphSize] = ()
    sort_limits = SortLimits()

    def configure(self, limits: StepLimits) -> None:
        """Called when model length, block size and scheduler limits are known, and again if the engine changes them."""

    def dispatch(self, need: GraphSize) -> GraphSize:
        """The size that a step of size ``need`` runs at."""
        return need

    def choose(self, needs: Sequence[GraphSize]) -> GraphSize:
        """The cheapest size for a step that may run in several ways, with what it needs in each."""
        sizes = [self.dispatch(need) for need in needs]
        return sizes[0] if len(sizes) == 1 else min(sizes, key=lambda size: step_cost(np.array(size)))

    def num_compilations(self) -> int:
        """Graphs that this process has captured or compiled so far; the checks hold it still after warm-up."""
        return 0

    def wrap(self, function: StepFunction, state: list[torch.Tensor]) -> StepFunction:
        """Returns what the runner calls in place of ``function``.

        ``function`` updates the tensors in ``state`` in place. A policy that compiles it may replace the elements of
        the list by new tensors instead; the runner reads them through the list only.
        """
        return function

    def compile_ahead(self, warm_up: Callable[[], None]) -> None:
        """Called once before ``warm_up`` is.

        A policy that can compile functions without running them calls it here, with functions that compile and return
        tensors without contents, so that compilations may go side by side.
        """


class BucketPolicy(GraphPolicy):
    """A fixed list of sizes; a step runs at the cheapest that holds it."""

    def set_sizes(self, sizes: Sequence[GraphSize]) -> None:
        """``sizes`` in any order, repeats allowed."""
        self.sizes = sorted(set(sizes), key=lambda size: (step_cost(np.array(size)), size))
        self._table = np.array(self.sizes, np.int64).reshape(-1, len(GraphSize._fields))

    def dispatch(self, need: GraphSize) -> GraphSize:
        index = first_that_holds(self._table, *need)
        if index < 0:
            raise NoGraphSizeError(f"no captured size holds a step of {need}")
        return self.sizes[index]


@compiled
def first_that_holds(
    sizes: np.ndarray, query_tile: int, num_tokens: int, num_reqs: int, num_tiles: int, num_pairs: int
) -> int:
    """The first of ``sizes`` [N, 5] that ``GraphSize.holds`` a step of these numbers, or -1."""
    for index in range(len(sizes)):
        if (
            sizes[index, 4] >= num_pairs
            and sizes[index, 0] == query_tile
            and sizes[index, 1] >= num_tokens
            and sizes[index, 2] >= num_reqs
            and sizes[index, 3] >= num_tiles
        ):
            return index
    return -1


def step_cost(sizes: np.ndarray) -> np.ndarray:
    """What steps of these sizes, [..., 5] as GraphSize has them, cost in units of one token; only to compare sizes.

    A pair costs the reading of its KV tile and the arithmetic of its queries. The weights lie between what was
    measured with a small model on a CPU, where pairs are dearer, and the arithmetic of a large model, where they are
    cheaper.
    """
    query_tile, num_tokens, num_reqs, _, num_pairs = np.moveaxis(sizes, -1, 0)
    pair = np.where(query_tile == WHOLE_LINES, WHOLE_LINES_COST, 1 + query_tile / 16)
    return num_tokens + 0.2 * num_reqs + num_pairs * pair / 4


def geometric(start: int, stop: int, factor: int = 2) -> list[int]:
    """``start``, ``start * factor``, ... below ``stop``, then ``stop`` itself."""
    values = []
    value = min(start, stop)
    while value < stop:
        values.append(value)
        value *= factor
    return [*values, stop]
