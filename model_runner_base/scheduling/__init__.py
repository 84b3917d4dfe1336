"""A scheduler of vLLM's that costs what changed, not what runs.

Requests in steady decode become rows of arrays (``rows.py``), and vLLM's own code schedules everything else beside them
(``scheduler.py``). Decisions are vLLM's. docs/scheduling.md says how to use it.
"""

from model_runner_base.scheduling.failures import RequestFailures
from model_runner_base.scheduling.scheduler import AsyncRowScheduler, RowScheduler, RowScheduling, make_scheduler

__all__ = ["AsyncRowScheduler", "RequestFailures", "RowScheduler", "RowScheduling", "make_scheduler"]
