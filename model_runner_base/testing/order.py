"""Order of the kit's groups: what the others rest on comes first, what takes longest last."""

from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "checks"
ALONE = ["server", "ranks", "stages", "replicas"]
"""Groups that have the device for themselves, as this process has not opened it yet."""
FIRST = ["interfaces", *ALONE, "start", "compilation", "device_operations", "equality"]
"""Groups that run before all others.

``interfaces`` names what drifted before an engine starts. ``start`` ends the run if no engine starts. ``compilation``
comes before groups with other engines, since late compilations show only in a process that has compiled nothing
before."""
SHARING = [
    "noise",
    "repeated_numbers",
    "sampling",
    "combinations",
    "seeds",
    "logprobs",
    "hostile_requests",
    "distributions",
    "structured_outputs",
]
"""Groups whose checks share the engine of ``text_engine()``: an engine may take half a minute to start.

``structured_outputs`` comes last, since it goes on with another backend's engine."""
LAST = ["soak"]
"""Groups that run after all others: many requests, which say little while anything else is wrong."""


def group_of(item: pytest.Item) -> str | None:
    """Group of a check, which is the name of its file; None for a test that is not the kit's."""
    return item.path.stem.removeprefix("test_") if item.path.parent == CHECKS else None


def rank(group: str | None) -> int:
    """Place of a group in the order. Those without a place of their own come before the last ones, in their order."""
    order = [*FIRST, *SHARING, None, *LAST]
    return order.index(group if group in order else None)


def sort_checks(items: list[pytest.Item]) -> None:
    """Sorts checks by group; within a group their order stays."""
    items.sort(key=lambda item: rank(group_of(item)))
