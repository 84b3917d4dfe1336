"""vLLM's schedulers with rows and corrections, and the choice of one for an engine."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from model_runner_base.scheduling.corrections.bidirectional_images import BidirectionalImages
from model_runner_base.scheduling.corrections.preempted_steps import PreemptedSteps
from model_runner_base.scheduling.corrections.prefixes import ChunkPrefixes, ExternalPrefixes, StatePrefixes
from model_runner_base.scheduling.corrections.session_turns import SessionTurns, StateSessions
from model_runner_base.scheduling.corrections.turn_params import TurnParams
from model_runner_base.scheduling.corrections.window_blocks import WindowBlocks
from model_runner_base.scheduling.dropped_caches import forget_dropped_caches
from model_runner_base.scheduling.releases import DROPS_STALE_OUTPUTS, has_known_steps
from model_runner_base.scheduling.rows.row_steps import RowSteps
from model_runner_base.scheduling.state_group import WAITS_FOR_STATES, keeps_states, with_states

Turns: type[TurnParams] = TurnParams if DROPS_STALE_OUTPUTS else SessionTurns
"""Corrections of sessions. A release that drops stale outputs itself needs those of ``TurnParams`` alone."""


class Corrections(
    ExternalPrefixes,
    StateSessions,
    WindowBlocks,
    ChunkPrefixes,
    PreemptedSteps,
    Turns,  # type: ignore[misc, valid-type]
    BidirectionalImages,
):
    """Mixin of all corrections that rows go with."""


class RowScheduling(RowSteps, Corrections):
    """Rows and all corrections: a mixin for ``Scheduler``, ``AsyncScheduler`` or a class of the user's."""


class RowScheduler(RowScheduling, Scheduler):
    """vLLM's ``Scheduler`` with rows and corrections."""


class AsyncRowScheduler(RowScheduling, AsyncScheduler):
    """vLLM's ``AsyncScheduler`` with rows and corrections."""


class PrefixScheduler(StatePrefixes, RowScheduler):
    """``RowScheduler`` of a model with recurrent layers whose prefixes are kept, for vLLM 0.16."""


class AsyncPrefixScheduler(StatePrefixes, AsyncRowScheduler):
    """``AsyncRowScheduler`` of such a model."""


class TurnScheduler(StateSessions, ChunkPrefixes, PreemptedSteps, TurnParams, Scheduler):
    """vLLM's ``Scheduler`` with corrections only, for a release whose steps have fields that rows do not know."""


class AsyncTurnScheduler(StateSessions, ChunkPrefixes, PreemptedSteps, TurnParams, AsyncScheduler):
    """vLLM's ``AsyncScheduler`` with corrections only."""


def make_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> TurnParams:
    """Makes the scheduler that the configuration asks for; ``scheduler_cls`` names this function."""
    forget_dropped_caches()
    groups = with_states(kv_cache_config, vllm_config)
    sync, asynchronous = (RowScheduler, AsyncRowScheduler) if has_known_steps() else (TurnScheduler, AsyncTurnScheduler)
    if keeps_states(vllm_config) and not WAITS_FOR_STATES:
        sync, asynchronous = PrefixScheduler, AsyncPrefixScheduler
    cls = asynchronous if vllm_config.scheduler_config.async_scheduling else sync
    return cls(vllm_config, groups, *args, **kwargs)


# The runner asks a scheduler class, or this function, for four abilities: to end requests that failed, to give out
# states of recurrent layers, to keep the blocks of a sliding window until drafts are verified, and to forget what a
# preempted request did not compute.
make_scheduler.reads_errors = True  # type: ignore[attr-defined]
make_scheduler.gives_states = True  # type: ignore[attr-defined]
make_scheduler.keeps_window_blocks = has_known_steps()  # type: ignore[attr-defined]
make_scheduler.forgets_preempted_steps = True  # type: ignore[attr-defined]
