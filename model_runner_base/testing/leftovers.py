"""Checks that finished requests leave nothing in an engine."""

import gc
from collections.abc import Iterator
from typing import Any

from vllm import LLM

from model_runner_base.step.request_states import RequestInfo
from model_runner_base.testing.engine import core_of, runner_of


def count_infos() -> int:
    """Number of requests' ``RequestInfo`` objects in the whole process."""
    gc.collect()
    return sum(isinstance(thing, RequestInfo) for thing in gc.get_objects())


def places_of(thing: Any, name: str, path: str, seen: set[int]) -> Iterator[str]:
    """Yields the places in the runner's objects at which a dict or set holds a request with ``name`` in its id."""
    if id(thing) in seen or isinstance(thing, str | bytes | type):
        return
    seen.add(id(thing))
    if isinstance(thing, dict | set | frozenset):
        yield from (f"{path} holds {key}" for key in thing if isinstance(key, str) and name in key)
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield from places_of(value, name, f"{path}[{key!r}]", seen)
    elif isinstance(thing, list | tuple):
        for index, value in enumerate(thing):
            yield from places_of(value, name, f"{path}[{index}]", seen)
    elif type(thing).__module__.split(".")[0] not in {"torch", "numpy", "vllm", "builtins", "transformers"}:
        for attribute, value in getattr(thing, "__dict__", {}).items():
            yield from places_of(value, name, f"{path}.{attribute}", seen)


def check_nothing_left(llm: LLM, name: str, num_infos: int, known: int = 0) -> None:
    """Asserts that no block, row or entry is left of the requests with ``name`` in their ids.

    Args:
        num_infos: ``count_infos()`` before they came.
        known: number of requests of other names whose end the runner has not been told yet.
    """
    runner, core = runner_of(llm), core_of(llm)
    assert not core.scheduler.requests
    llm.reset_prefix_cache()
    assert core.scheduler.kv_cache_manager.usage == 0, "blocks are not free"
    assert runner.parts.requests.num_reqs <= known, f"{runner.parts.requests.num_reqs} rows are taken"
    found = list(places_of(runner, name, "runner", set()))
    assert not found, f"{len(found)} entries are left: {found[:3]}"
    left = count_infos() - num_infos
    assert left <= known, f"what is known of {left} requests is still held somewhere"
