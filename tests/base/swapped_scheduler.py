"""Plugin of pytest that puts our schedulers in place of vLLM's in vLLM's own tests (docs/upstream.md):

    SCHEDULERS=ours PYTHONPATH=tests/base:. python -m model_runner_base.testing.upstream \\
        vllm.v1.worker.cpu_worker.CPUWorker --platform vllm.platforms.cpu.CpuPlatform \\
        --files v1/core/test_ -k "not e2e.py" -p swapped_scheduler

On vLLM 0.33, with ``--list tests/base/scheduler_tests.toml``, too. Files whose names end with "e2e.py" start engines.

``SCHEDULERS=rows``: ours, with rows for a single request, too. Without it the tests run with vLLM's schedulers.
"""

import os
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Replaces the schedulers' names where the tests import them."""
    if (named := os.environ.get("SCHEDULERS")) in ("ours", "rows"):
        from vllm.v1.core.sched import async_scheduler, scheduler

        from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler

        modules: tuple[Any, Any] = (scheduler, async_scheduler)
        # Some tests make a scheduler without ``__init__``.
        bare: dict[str, Any] = {"_rows": None, "late_outputs": {}, "after_update": []}
        attributes = bare | ({"least_rows": 1} if named == "rows" else {})
        modules[0].Scheduler = modules[1].Scheduler = type("Rows", (RowScheduler,), attributes)
        modules[1].AsyncScheduler = type("AsyncRows", (AsyncRowScheduler,), attributes)
