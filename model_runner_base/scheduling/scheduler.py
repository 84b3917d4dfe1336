"""vLLM's schedulers with rows and corrections, and the choice of one for an engine."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from model_runner_base.scheduling.corrections.bidirectional_images import BidirectionalImages
from model_runner_base.scheduling.corrections.session_turns import SessionTurns
from model_runner_base.scheduling.corrections.state_sessions import StateSessions
from model_runner_base.scheduling.corrections.turn_params import TurnParams
from model_runner_base.scheduling.rows.row_steps import RowSteps
from model_runner_base.scheduling.rows.support import has_steps_of_rows
from model_runner_base.scheduling.state_group import with_states


class RowScheduling(RowSteps, StateSessions, SessionTurns, BidirectionalImages):
    """Rows and all corrections: a mixin for ``Scheduler``, ``AsyncScheduler`` or a class of the user's."""


class RowScheduler(RowScheduling, Scheduler):
    """vLLM's ``Scheduler`` with rows and corrections."""


class AsyncRowScheduler(RowScheduling, AsyncScheduler):
    """vLLM's ``AsyncScheduler`` with rows and corrections."""


class TurnScheduler(TurnParams, Scheduler):
    """vLLM's ``Scheduler`` with corrections only, for a release whose steps have fields that rows do not know."""


class AsyncTurnScheduler(TurnParams, AsyncScheduler):
    """vLLM's ``AsyncScheduler`` with corrections only."""


def make_scheduler(*args: Any, **kwargs: Any) -> TurnParams:
    """Makes the scheduler that the configuration asks for; ``scheduler_cls`` names this function."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kwargs["kv_cache_config"] = with_states(kwargs["kv_cache_config"], config)
    sync, asynchronous = (
        (RowScheduler, AsyncRowScheduler) if has_steps_of_rows() else (TurnScheduler, AsyncTurnScheduler)
    )
    return (asynchronous if config.scheduler_config.async_scheduling else sync)(*args, **kwargs)


make_scheduler.reads_errors = True  # type: ignore[attr-defined]
