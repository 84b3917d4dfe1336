"""Which step sizes a device runs at, and how a step is padded to one of them.

Captured device graphs and compiled buckets are one idea here: a list of sizes that are captured ahead, one dispatch
that picks the cheapest size a step fits in, and padding up to it. The default policy is eager: every step runs at the
size it has and nothing is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_runner_base.step.sizes import COMMON_DIMS, Dim, StepLimits, StepSize, cost_of, first_that_holds


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

    sizes: Sequence[StepSize] = ()
    sort_limits = SortLimits()
    dims: Sequence[Dim] = COMMON_DIMS
    """What the numbers of a size are, and cost."""

    def configure(self, limits: StepLimits) -> None:
        """Called when model length, block size and scheduler limits are known, and again if the engine changes them."""
        self.dims = limits.dims

    def dispatch(self, need: StepSize) -> StepSize:
        """The size that a step of size ``need`` runs at."""
        return need

    def choose(self, needs: Sequence[StepSize]) -> StepSize:
        """The cheapest size for a step that may run in several ways, with what it needs in each."""
        if len(needs) == 1:
            return self.dispatch(needs[0])
        return min(map(self.dispatch, needs), key=self.cost)

    def cost(self, size: StepSize) -> float:
        """What a step of a size costs, in units of one token; only to compare sizes."""
        return float(cost_of(np.array(size.as_row()), self.dims))

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

    def set_sizes(self, sizes: Sequence[StepSize]) -> None:
        """``sizes`` in any order, repeats allowed; ``configure`` of this class comes first."""
        self.sizes = sorted(set(sizes), key=lambda size: (self.cost(size), size))
        self._table = np.array([size.as_row() for size in self.sizes], np.int32).reshape(-1, 1 + len(self.dims))

    def dispatch(self, need: StepSize) -> StepSize:
        index = first_that_holds(self._table, int(need.kind), need.dims)
        if index < 0:
            dims = ", ".join([f"{count} {dim.name}" for count, dim in zip(need.dims, self.dims, strict=True)])
            raise NoGraphSizeError(f"no captured size holds a step of {need.kind}: {dims}")
        return self.sizes[index]
