"""An engine whose workers Ray starts, in a cluster of its own."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import engine
from vllm import LLM

from model_runner_base.testing.engine import core_of

VARIABLES = {
    "RAY_ADDRESS": "local",  # Whatever cluster runs here already.
    "RAY_AUTH_MODE": "disabled",  # Else Ray writes a token into the home folder.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",  # Else workers wait for all other processes of a busy machine.
}


@contextmanager
def engine_by_ray(model: Path, resources: Mapping[str, int], env: Mapping[str, str], **options: Any) -> Iterator[LLM]:
    """An engine in a cluster with ``resources`` beside one CPU. No process of it outlives the context.

    ``env`` has variables of the engine.
    """
    memory = {"CPU": 1, "object_store_memory": 100_000_000}
    variables = VARIABLES | {"RAY_OVERRIDE_RESOURCES": json.dumps(memory | dict(resources))} | dict(env)
    others = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            with engine(model, distributed_executor_backend="ray", **options) as llm:
                started = [
                    process
                    for child in set(psutil.Process().children()) - others
                    if not any("resource_tracker" in argument for argument in child.cmdline())  # Python's own.
                    for process in (child, *child.children(recursive=True))
                ]
                yield llm
                core_of(llm).shutdown()  # Left to Python, it would come after Ray's end, and start it again.
        finally:
            ray.shutdown()
    assert started and not psutil.wait_procs(started, timeout=30)[1]
