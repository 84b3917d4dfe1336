"""Which step sizes a device runs at, and how a step is padded to one of them.

Captured device graphs and compiled buckets are one idea here: a list of sizes that are captured ahead, one dispatch
that picks the cheapest size a step fits in, and padding up to it. The default policy is eager: every step runs at the
size it has and nothing is captured.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from math import log
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
WrapFunction = Callable[[StepFunction, MutableSequence[torch.Tensor]], StepFunction]
"""``GraphPolicy.wrap``, as components and heads with functions of their own are given it."""


Wait = Callable[[], None]
"""Returns when something is compiled, or raises its error; may be called again."""


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

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        """Returns what the runner calls in place of ``function``.

        ``function`` updates the tensors in ``state`` in place. A policy that compiles it may replace the elements of
        the list by new tensors instead; the runner reads them through the list only.
        """
        return function

    # ---- Making the sizes ----

    @property
    def offered(self) -> Sequence[StepSize]:
        """Those of the sizes that steps may run at by now."""
        return self.sizes

    def make_ahead(self, runs: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Calls each of ``runs``, which makes what it runs; yields whenever one is made.

        A policy that can compile functions without running them may call them twice: first with functions that compile
        and return tensors without contents, so that compilations go side by side.
        """
        for run in runs:
            run()
            yield

    def first_sizes(self, sizes: Sequence[StepSize]) -> Sequence[StepSize]:
        """Those of ``sizes`` that steps are not served without; the others are made while steps run.

        Where there are several workers all of them, since ranks would come to different sizes in one step. A policy
        that leaves some out has what follows.
        """
        return sizes

    num_at_a_time = 1
    """Compilations behind the steps."""

    def compile_in_background(self, run: Callable[[], None]) -> Wait:
        """Called between two steps: calls ``run`` with functions that begin to compile, as ``make_ahead`` may.

        When it returns, steps may go on; what it returns waits for the compilation.
        """
        raise NotImplementedError

    def offer_only(self, sizes: Sequence[StepSize]) -> None:
        """Steps run at these of the sizes alone."""

    def offer(self, size: StepSize) -> None:
        """A size that was left out may serve from now on."""

    def most_wanted(self, sizes: Sequence[StepSize]) -> StepSize:
        """The one of ``sizes``, which are still to be made, that does most good."""
        return sizes[0]


class BucketPolicy(GraphPolicy):
    """A fixed list of sizes; a step runs at the cheapest that holds it."""

    _offered: Sequence[StepSize] = ()

    def set_sizes(self, sizes: Sequence[StepSize]) -> None:
        """``sizes`` in any order, repeats allowed; ``configure`` of this class comes first."""
        self.sizes = sorted(set(sizes), key=lambda size: (self.cost(size), size))
        self._every = self._table_of(self.sizes)
        self._last_needs: deque[StepSize] = deque(maxlen=64)
        self.offer_only(self.sizes)

    @property
    def offered(self) -> Sequence[StepSize]:
        return self._offered

    def _table_of(self, sizes: Sequence[StepSize]) -> np.ndarray:
        return np.array([size.as_row() for size in sizes], np.int32).reshape(-1, 1 + len(self.dims))

    def offer_only(self, sizes: Sequence[StepSize]) -> None:
        self._offered = [size for size in self.sizes if size in sizes]
        self._table = self._table_of(self._offered)
        self._last_needs.clear()

    def dispatch(self, need: StepSize) -> StepSize:
        self._last_needs.append(need)
        index = self._cheapest(self._table, need)
        if index < 0:
            dims = ", ".join([f"{count} {dim.name}" for count, dim in zip(need.dims, self.dims, strict=True)])
            raise NoGraphSizeError(f"no captured size holds a step of {need.kind}: {dims}")
        return self._offered[index]

    def largest_sizes(self, sizes: Sequence[StepSize]) -> list[StepSize]:
        """Those of ``sizes`` that no other of them holds: together they hold whatever the others do."""
        return [size for size in sizes if not any(other.holds(size) for other in sizes if other != size)]

    def offer(self, size: StepSize) -> None:
        self._offered = [each for each in self.sizes if each in self._offered or each == size]
        self._table = self._table_of(self._offered)

    def most_wanted(self, sizes: Sequence[StepSize]) -> StepSize:
        """What makes steps like the last ones cheapest; of all sizes, if those run at what they need already."""
        wanted = Counter(self._cheapest(self._every, need) for need in self._last_needs.copy())
        unserved = {index: count for index, count in wanted.items() if self.sizes[index] not in self.offered}
        weights = unserved or dict.fromkeys(range(len(self.sizes)), 1)

        def good_of(size: StepSize) -> float:
            """By how much it makes a step cheaper, as a logarithm, summed over the steps that it could serve."""
            good = 0.0
            for index, weight in weights.items():
                if size.holds(self.sizes[index]):
                    now = self.offered[self._cheapest(self._table, self.sizes[index])]
                    good += weight * max(0.0, log((1 + self.cost(now)) / (1 + self.cost(size))))
            return good

        return max(sizes, key=good_of)

    def _cheapest(self, table: np.ndarray, need: StepSize) -> int:
        return first_that_holds(table, int(need.kind), need.dims)
