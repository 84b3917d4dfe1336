"""Front end of an engine of this library, on any platform: checks of requests, error handling, choice of the scheduler.

``PagedPlatform`` calls ``stand_before`` itself. On a platform that does not know this library, such as one of vLLM's
own, the entry point of ``vllm.general_plugins`` sees to that for engines whose worker is a ``ModelRunnerWorker``. vLLM
calls the entry point in each of its processes. vLLM's config package imports platforms, so this file imports nothing of
vLLM at its top.
"""

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any

from model_runner_base.admission.our_engines import SCHEDULER, WORKERS, check_arriving, is_ours

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER_MODULE = "model_runner_base.worker"
"""Module of ``ModelRunnerWorker``, which is not imported here, since it imports the platform."""


def stand_before(vllm_config: "VllmConfig", scheduler_cls: str = SCHEDULER) -> None:
    """Prepares this process for an engine's requests. It may be called many times, once ``worker_cls`` is known.

    Sets ``scheduler_cls`` if the user has named none, and raises UnsupportedConfigError for settings that are not
    supported. A platform that is no ``PagedPlatform`` and chooses a worker of this library must call this in
    ``check_and_update_config`` once ``block_size`` is set, and ``our_engines.check_arriving`` in ``validate_request``.
    """
    from model_runner_base.admission.adapter_requests import load_adapters_first
    from model_runner_base.admission.hybrid_config import choose_cache_mode
    from model_runner_base.admission.item_checks import check_fields, check_shares
    from model_runner_base.admission.limits import check_config
    from model_runner_base.admission.refusals import refuse_in_words
    from model_runner_base.admission.refused_items import forget_refused_items
    from model_runner_base.admission.request_checks import RequestChecks
    from model_runner_base.admission.request_errors import hold_requests
    from model_runner_base.vllm_compat.patches.dead_engines import give_errors_at_once
    from model_runner_base.vllm_compat.patches.engine_processes import (
        end_servers_and_engines_with_this_process,
        end_workers_with_this_process,
    )
    from model_runner_base.vllm_compat.patches.items import keep_item_data, keep_sounds_whole, scale_in_processor
    from model_runner_base.vllm_compat.patches.worker_answers import read_all_answers
    from model_runner_base.vllm_compat.probes.config import serve_own_replicas_alone

    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = scheduler.scheduler_cls or scheduler_cls
    check_config(vllm_config)
    serve_own_replicas_alone(vllm_config.parallel_config)
    choose_cache_mode(vllm_config)
    if not is_ours(vllm_config):
        WORKERS.append(vllm_config.parallel_config.worker_cls)
    end_servers_and_engines_with_this_process(is_ours)
    give_errors_at_once(is_ours)
    if vllm_config.parallel_config.world_size > 1:
        # For an engine in this process.
        end_workers_with_this_process(is_ours)
        read_all_answers(is_ours)
    model = vllm_config.model_config
    if model is None:
        return
    keep_sounds_whole(model.architecture)
    scale_in_processor(model)
    keep_item_data()
    refuse_in_words()
    hold_requests(RequestChecks.of)
    load_adapters_first()
    forget_refused_items(check_fields, check_shares)


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm import platforms

    from model_runner_base.vllm_compat.patches.engine_processes import end_workers_with_this_process, is_process_of_core
    from model_runner_base.vllm_compat.patches.worker_answers import read_all_answers

    quiet_scheduler_warning()
    platform = type(platforms.current_platform)
    knows_us = getattr(platform, "stands_before_requests", False)
    if not knows_us:
        _extend(platform)
    if is_process_of_core():
        # This process was not prepared for its engine, whose config came as it is.
        def is_engine_ours(engine_config: "VllmConfig") -> bool:
            return knows_us or _is_our_worker(engine_config.parallel_config.worker_cls)

        end_workers_with_this_process(is_engine_ours)
        read_all_answers(is_engine_ours)


def quiet_scheduler_warning() -> None:
    """Suppresses vLLM's warning that its scheduler interface may change, if the scheduler is this library's.

    The warning is meant for users who name a class of their own.
    """
    logging.getLogger("vllm.config.scheduler").addFilter(_names_another_scheduler)


def _names_another_scheduler(record: logging.LogRecord) -> bool:
    return record.args != (SCHEDULER,)


def _extend(platform: Any) -> None:
    """Wraps a platform's hooks so that they prepare engines of this library and check their requests."""
    from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

    def preparing(check_and_update_config: Any) -> classmethod:
        @wraps(check_and_update_config)
        def prepare(cls: Any, vllm_config: "VllmConfig") -> None:
            named = vllm_config.parallel_config.worker_cls
            check_and_update_config(vllm_config)
            if _is_our_worker(named):
                stand_before(vllm_config)

        return classmethod(prepare)

    def checking(validate_request: Any) -> classmethod:
        @wraps(validate_request)
        def check(cls: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(("processed_inputs", "params"), args, strict=False)) | kwargs
            check_arriving(given["processed_inputs"], given["params"])
            validate_request(*args, **kwargs)

        return classmethod(check)

    def keeping(update_block_size_for_backend: Any) -> classmethod:
        @wraps(update_block_size_for_backend)
        def update(cls: Any, vllm_config: "VllmConfig") -> None:
            from model_runner_base.vllm_compat.types.recurrent import has_states

            # vLLM would raise it until a block is as large as a state, which has a tensor of its own here.
            if not has_states(vllm_config) or not is_ours(vllm_config):
                update_block_size_for_backend(vllm_config)

        return classmethod(update)

    wrap_once(platform, "check_and_update_config", preparing)
    wrap_once(platform, "update_block_size_for_backend", keeping)
    wrap_once(platform, "validate_request", checking)


def _is_our_worker(worker_cls: Any) -> bool:
    """Whether the user has named a worker of this library. A worker that the platform chooses by itself is not
    imported."""
    if isinstance(worker_cls, str):
        if worker_cls == "auto" or worker_cls.startswith("vllm."):
            return False
        from vllm.utils.import_utils import resolve_obj_by_qualname

        try:
            worker_cls = resolve_obj_by_qualname(worker_cls)
        except ImportError:
            return False  # vLLM raises it where the worker is made.
    return any(base.__module__ == WORKER_MODULE for base in worker_cls.__mro__)
