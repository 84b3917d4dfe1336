"""Graph policies: the step sizes that a device runs at, and the choice of one for each step.

Captured device graphs and compiled buckets are one idea here: a list of sizes that are captured in advance, one
dispatch that picks the cheapest size that holds a step, and padding up to it. The default policy is eager: every step
runs at its own size, and nothing is captured.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch

from model_runner_base.step.sizes import COMMON_DIMS, Dim, StepLimits, StepSize, cost_of, first_that_holds


@dataclass(frozen=True)
class SortLimits:
    """Limits on what a device's graphs may sort. By default there are none: tokens are drawn exactly, from the
    whole vocabulary."""

    max_candidates: int | None = None
    """Largest number of candidates, the likeliest tokens of a row, among which a token is drawn; None: all tokens.
    Tokens that tie for the last place are all candidates."""
    max_width: int | None = None
    """Length of the longest row that can be searched for its largest numbers in one operation; None: any."""


StepFunction = Callable[..., Any]
WrapFunction = Callable[[StepFunction, MutableSequence[torch.Tensor]], StepFunction]
"""Type of ``GraphPolicy.wrap``, which components and heads get for functions of their own."""


Wait = Callable[[], None]
"""Function that returns once something is compiled, or raises its error. It may be called again."""


FIXED_COST_OF_SLOW_STEPS = 16
"""Cost of a step of a large model that does not depend on its size, in units of one token: reading the weights."""


class NoGraphSizeError(RuntimeError):
    """Error of a step that no captured size holds; it is a fault of the policy, not of the request."""


class GraphPolicy:
    """Eager policy, and interface of others: no sizes, no padding but the plan's neutral pair, functions run as they
    are."""

    sizes: Sequence[StepSize] = ()
    sort_limits = SortLimits()
    dims: Sequence[Dim] = COMMON_DIMS
    """Names and costs of a size's numbers."""
    replaces_state = False
    """Whether a call of a wrapped function replaces the tensors of its state by new ones."""

    def configure(self, limits: StepLimits) -> None:
        """Called when model length, block size and scheduler limits are known, and again if the engine changes them."""
        self.dims = limits.dims

    def dispatch(self, need: StepSize) -> StepSize:
        """Size that a step of size ``need`` runs at."""
        return need

    def choose(self, needs: Sequence[StepSize]) -> StepSize:
        """Cheapest size for a step that may run in several ways; ``needs`` has the size that it needs in each."""
        if len(needs) == 1:
            return self.dispatch(needs[0])
        return min(map(self.dispatch, needs), key=self.cost)

    def agree(self, size: StepSize) -> StepSize:
        """Size that a step runs at, given the one that this rank has chosen: the same one by default.

        A policy whose ranks must run at equal sizes overrides it; it returns one that holds what each rank has chosen.
        It may be a collective operation: it is asked once in each step with tokens, and by warm-up for the few made-up
        steps that all ranks make in the same order. Runs on padding do not ask, since a rank may make a size at a time
        of its own (``BackgroundCompiler``).
        """
        return size

    def cost(self, size: StepSize) -> float:
        """Cost of a step of a size, in units of one token; only to compare sizes."""
        return float(cost_of(np.array(size.as_row()), self.dims))

    def num_compilations(self) -> int:
        """Number of graphs that this process has captured or compiled so far. Checks require that it stays the same
        after warm-up."""
        return 0

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        """Returns the function that the runner calls instead of ``function``, in the platform's inference mode.

        ``function`` updates the tensors in ``state`` in place; they may be among its arguments, too. A policy that
        compiles it may instead replace the list's elements by new tensors; the runner reads them through the list only.

        Each call's results are tensors of their own: the runner may keep them while the function runs again. Only where
        the first argument is a ``StepSize``, as of a step's graph, may they lie in memory that the next step's graph
        overwrites. Of these the last one, the packed buffer, has to stay until the next step of that size.
        """
        return function

    # ---- Making the sizes ----

    @property
    def offered(self) -> Sequence[StepSize]:
        """Sizes that steps may run at by now."""
        return self.sizes

    def make_ahead(self, runs: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Calls each of ``runs``, which makes the graphs of what it runs; yields after each one.

        A policy that can compile functions without running them may call each twice. In the first call the wrapped
        functions only begin to compile, and return tensors without contents. So compilations run in parallel.
        """
        for run in runs:
            run()
            yield

    def first_sizes(self, sizes: Sequence[StepSize]) -> Sequence[StepSize]:
        """Sizes, among ``sizes``, that are made before serving begins; the others are made while steps run.

        With several workers it must return all sizes, since ranks would choose different ones for a step. A policy that
        leaves some out has to provide the methods below.
        """
        return sizes

    num_at_a_time = 1
    """Number of compilations that run at a time while steps are served."""

    def compile_in_background(self, run: Callable[[], None]) -> Wait:
        """Calls ``run``, in which wrapped functions only begin to compile, as ``make_ahead`` may. Called between two
        steps.

        Steps go on when it returns. It returns a function that waits for the compilation.
        """
        raise NotImplementedError

    compiles_in_pauses = False
    """Whether ``compile_in_background`` returns only when the compilation is over. Sizes are then made while no request
    is served; one that arrives meanwhile waits for the run of a size that is being made."""

    def offer_only(self, sizes: Sequence[StepSize]) -> None:
        """Restricts steps to these sizes."""

    def offer(self, size: StepSize) -> None:
        """Lets steps run at a size that was left out before."""

    is_slow = False
    """Whether a step, and the compilation of a size, take seconds; a device says so that compiles large models on the
    cores that it computes with."""

    def most_wanted(self, sizes: Sequence[StepSize]) -> StepSize:
        """Size that helps most among ``sizes``, which are still to be made."""
        return sizes[0]

    def is_worth_it(self, size: StepSize) -> bool:
        """Whether to make ``size`` while steps are served; if not, it waits until none has run for a while."""
        return True


class SizeDoor:
    """Asks ``GraphPolicy.agree`` for the size of each step, once."""

    def __init__(self, agree: Callable[[StepSize], StepSize]) -> None:
        self._agree = agree
        self._agreed: StepSize | None = None
        """Size that was agreed on for a step that could not be repeated, and that is not packed yet."""

    def __call__(self, size: StepSize) -> StepSize:
        """Size at which a step is packed."""
        agreed, self._agreed = self._agreed, None
        return self._agree(size) if agreed is None else agreed

    def is_repeated_at(self, size: StepSize) -> bool:
        """Whether a step that this rank can repeat at a size runs at it; if not, the step must be packed."""
        agreed = self._agree(size)
        if agreed == size:
            return True
        self._agreed = agreed
        return False


class BucketPolicy(GraphPolicy):
    """Policy with a fixed list of sizes; a step runs at the cheapest one that holds it."""

    _offered: Sequence[StepSize] = ()

    def set_sizes(self, sizes: Sequence[StepSize]) -> None:
        """Sets the list. ``sizes`` may be in any order and have repeats. ``configure`` must have been called before."""
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
        """Sizes, among ``sizes``, that no other one holds: together they hold every step that any of ``sizes`` does."""
        return [size for size in sizes if not any(other.holds(size) for other in sizes if other != size)]

    def offer(self, size: StepSize) -> None:
        self._offered = [each for each in self.sizes if each in self._offered or each == size]
        self._table = self._table_of(self._offered)

    def most_wanted(self, sizes: Sequence[StepSize]) -> StepSize:
        """Size that saves most in steps like the last ones; if these already run at their best sizes, in steps of any
        size."""
        weights = self._unserved() or dict.fromkeys(range(len(self.sizes)), 1)
        return max(sizes, key=lambda size: self._good_of(size, weights))

    def is_worth_it(self, size: StepSize) -> bool:
        """Whether to make ``size`` while steps are served: always, or where steps are slow, if it makes the last ones
        half as dear on average."""
        return not self.is_slow or self._good_of(size, self._unserved()) >= len(self._last_needs) * log(2)

    def _unserved(self) -> dict[int, int]:
        """Number of the last steps by the index of their best size, of sizes that are not offered yet."""
        wanted = Counter(self._cheapest(self._every, need) for need in self._last_needs.copy())
        return {index: count for index, count in wanted.items() if self.sizes[index] not in self.offered}

    def _good_of(self, size: StepSize, weights: Mapping[int, int]) -> float:
        """Benefit of a size: the logarithm of the factor by which it makes a step cheaper, summed over the steps that
        it holds. ``weights`` are numbers of steps by the index of their best size."""
        good, fixed = 0.0, FIXED_COST_OF_SLOW_STEPS if self.is_slow else 1
        for index, weight in weights.items():
            if size.holds(self.sizes[index]):
                now = self.offered[self._cheapest(self._table, self.sizes[index])]
                good += weight * max(0.0, log((fixed + self.cost(now)) / (fixed + self.cost(size))))
        return good

    def _cheapest(self, table: np.ndarray, need: StepSize) -> int:
        return first_that_holds(table, int(need.kind), need.dims)


class GraphState:
    """Tensors that a graph updates in place: one list, of which each owner holds a part.

    A policy that compiles a function may replace the tensors by new ones (``GraphPolicy.wrap``), so an owner reads its
    tensors through the view that ``hold`` returned.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def hold(self, tensors: Sequence[torch.Tensor]) -> "HeldTensors":
        """Appends tensors; returns a view that always has the newest of them."""
        start = len(self.tensors)
        self.tensors += tensors
        return HeldTensors(self.tensors, start, len(self.tensors))


class HeldTensors(MutableSequence[torch.Tensor]):
    """View of one owner's part of a graph's state. It also serves as the state of a graph that updates no other
    part."""

    def __init__(self, tensors: list[torch.Tensor], start: int, stop: int) -> None:
        self._tensors = tensors
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self._tensors[place] for place in self._range[index]]
        return self._tensors[self._range[index]]

    def __setitem__(self, index, tensor):  # type: ignore[no-untyped-def]
        self._tensors[self._range[index]] = tensor

    def __delitem__(self, index: Any) -> None:
        raise TypeError("the number of tensors in a graph's state is fixed")

    def insert(self, index: int, tensor: torch.Tensor) -> None:
        del self[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors[self._range.start : self._range.stop])
