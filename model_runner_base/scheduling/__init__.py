"""vLLM's scheduler with corrections, and with rows, whose cost follows the requests that change, not those that run.

``corrections/`` has classes over vLLM's scheduler, each for something that vLLM does wrong or not at all. ``rows/``
keeps requests in steady decode in arrays and leaves everything else to vLLM's own code; decisions are vLLM's. Neither
imports the other: both build on ``step_hooks.py``, and ``scheduler.py`` composes them. See docs/scheduling.md.
"""

from model_runner_base.scheduling.corrections.failures import RequestFailures
from model_runner_base.scheduling.scheduler import AsyncRowScheduler, RowScheduler, RowScheduling, make_scheduler

__all__ = ["AsyncRowScheduler", "RequestFailures", "RowScheduler", "RowScheduling", "make_scheduler"]
