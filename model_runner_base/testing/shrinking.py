"""Search for a smaller case whose tokens are wrong too: fewer requests, a shorter prompt, fewer outputs.

Hypothesis shrinks what it has drawn itself. The cases here are fixed, and an engine takes up to a second for each try,
so the search halves, and ends in time.
"""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

from model_runner_base.testing.mismatch import Case, Difference
from model_runner_base.testing.time_limit import OutOfTime

Fails = Callable[[Case], Difference | None]
"""Function that runs a case: how it differs, or None if it is right."""


class Smallest(NamedTuple):
    """Smallest failing case that was found."""

    case: Case
    difference: Difference
    is_cut: bool
    """Whether the time was over before all smaller ones were tried."""


def shrink(case: Case, difference: Difference, fails: Fails, seconds: float) -> Smallest:
    """The smallest failing case that is found within the time; a try may also raise ``OutOfTime``."""
    end = monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(case, difference):
            if monotonic() > end:
                return Smallest(case, difference, is_cut=True)
            try:
                found = fails(candidate)
            except OutOfTime:
                return Smallest(case, difference, is_cut=True)
            if found:
                case, difference, is_smaller = candidate, found, True
                break
    return Smallest(case, difference, is_cut=False)


def _smaller(case: Case, difference: Difference) -> Iterator[Case]:
    """Smaller cases, the smallest first."""
    prompts, counts = case
    index, num_outputs = difference.request, difference.output + 1
    if len(prompts) > 1:
        yield Case(prompts[index : index + 1], counts[index : index + 1])
        half = len(prompts) // 2
        for kept in (range(half), range(half, len(prompts))):
            yield Case([prompts[i] for i in kept], [counts[i] for i in kept])
        if len(prompts) <= 8:
            for left_out in range(len(prompts)):
                yield Case(prompts[:left_out] + prompts[left_out + 1 :], counts[:left_out] + counts[left_out + 1 :])
    if max(counts) > num_outputs:
        yield Case(prompts, [min(count, num_outputs) for count in counts])
    length = len(prompts[index])
    step = length - length // 2
    while step:
        shorter = prompts[index][: length - step]
        if shorter:
            yield Case([*prompts[:index], shorter, *prompts[index + 1 :]], counts)
        step //= 2
