"""Schedulers of this library in tests that make a scheduler, and no worker."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

from model_runner_base.testing.upstream.allow_list import TestFile


@contextmanager
def schedulers_of(file: TestFile) -> Iterator[None]:
    """Puts this library's schedulers in place of vLLM's classes while one file is imported or tested.

    The platform checks no config then: its limits are those of its worker.
    """
    if not file.schedulers:
        yield
        return
    from vllm.platforms import current_platform
    from vllm.v1.core.sched import async_scheduler, scheduler

    rows, async_rows = _classes()
    ours = {scheduler.Scheduler: rows, async_scheduler.AsyncScheduler: async_rows}
    # Helpers of the tests may be imported before the file is, by a conftest.py.
    tests = [module for name, module in [*sys.modules.items()] if name.startswith("tests.")]
    unchecked = classmethod(lambda cls, vllm_config: None)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(current_platform), "check_and_update_config", unchecked))
        for module in (scheduler, async_scheduler, *tests):
            for cls in ours:
                if vars(module).get(cls.__name__) is cls:
                    stack.enter_context(mock.patch.object(module, cls.__name__, ours[cls]))
        stack.callback(_take_back, rows, set(vars(rows)))
        yield


def _take_back(scheduler: type, attributes: set[str]) -> None:
    """Takes away what a test added to the class, such as one that plays a plugin which replaces a method."""
    for name in set(vars(scheduler)) - attributes:
        delattr(scheduler, name)


@cache
def _classes() -> tuple[type, type]:
    """Schedulers that keep a single request in rows, too, since most tests have no more than three."""
    from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler

    # Some tests make a scheduler without ``__init__``.
    attributes: dict[str, Any] = {"least_rows": 1, "_rows": None, "late_outputs": {}, "after_update": []}
    return type("Rows", (RowScheduler,), attributes), type("AsyncRows", (AsyncRowScheduler,), attributes)
