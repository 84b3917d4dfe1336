"""Differences of vLLM's releases in what their schedulers count."""

from functools import cache
from inspect import getsource


@cache
def counts_running_adapters() -> bool:
    """Whether ``max_loras`` limits the adapters of all running requests, also of those that are not in the next step.

    Elsewhere a scheduler that works on several batches in turn may admit more, and ends when they meet in one step.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "for req in self.running" in getsource(Scheduler.schedule)
