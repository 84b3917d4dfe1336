"""What stands between clients and an engine of ours, on any platform: checks, errors of single requests, the scheduler.

``PagedPlatform`` asks for it itself. On a platform that knows nothing of this library, such as vLLM's own of CUDA, the
entry point of ``vllm.general_plugins`` does, which vLLM calls in each of its processes, for engines whose worker is a
``ModelRunnerWorker``. vLLM's config package imports platforms, so nothing of vLLM's is imported here at the top.
"""

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from model_runner_base.request_checks import RequestChecks

SCHEDULER = "model_runner_base.scheduling.make_scheduler"
"""Qualified name of what makes the scheduler where the user names none. Called as a class."""

_checks: "RequestChecks | None" = None
"""Those of the newest engine in this process, on a platform that has none of its own; None if it is not one of ours."""


def stand_before(vllm_config: "VllmConfig", scheduler_cls: str = SCHEDULER) -> "RequestChecks | None":
    """Prepares this process for an engine's requests, any number of times.

    Raises UnsupportedConfigError for what is not supported, and sets ``scheduler_cls`` where the user has named none.

    Returns:
        What ``Platform.validate_request`` is to ask; None where the config has no model.
    """
    from model_runner_base.limits import check_config
    from model_runner_base.multimodal.item_checks import check_fields, check_shares
    from model_runner_base.request_checks import RequestChecks
    from model_runner_base.vllm_port.adapter_requests import load_adapters_first
    from model_runner_base.vllm_port.item_data import keep_item_data
    from model_runner_base.vllm_port.refusals import refuse_in_words
    from model_runner_base.vllm_port.refused_items import forget_refused_items
    from model_runner_base.vllm_port.request_errors import hold_requests
    from model_runner_base.vllm_port.whole_sounds import keep_sounds_whole

    check_config(vllm_config)
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = scheduler.scheduler_cls or scheduler_cls
    model = vllm_config.model_config
    if model is None:
        return None
    keep_sounds_whole(model.architecture)
    keep_item_data()
    refuse_in_words()
    hold_requests()
    load_adapters_first()
    forget_refused_items(check_fields, check_shares)
    return RequestChecks.of(model)


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm import platforms

    quiet_scheduler_warning()
    platform = type(platforms.current_platform)
    if not getattr(platform, "stands_before_requests", False):
        _extend(platform)


def quiet_scheduler_warning() -> None:
    """Leaves out vLLM's warning that its interface of schedulers may change, where the scheduler is this library's.

    It is a warning to people who named a class of their own.
    """
    logging.getLogger("vllm.config.scheduler").addFilter(_names_another_scheduler)


def _names_another_scheduler(record: logging.LogRecord) -> bool:
    return record.args != (SCHEDULER,)


def _extend(platform: Any) -> None:
    """Has a platform's hooks prepare the engines of ours, and check their requests."""
    check_and_update_config, validate_request = platform.check_and_update_config, platform.validate_request
    if hasattr(check_and_update_config, "__wrapped__"):
        return

    @wraps(check_and_update_config)
    def preparing(cls: Any, vllm_config: "VllmConfig") -> None:
        global _checks
        check_and_update_config(vllm_config)
        _checks = stand_before(vllm_config) if _has_our_worker(vllm_config) else None

    @wraps(validate_request)
    def checking(cls: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("processed_inputs", "params"), args, strict=False)) | kwargs
        if _checks is not None:
            _checks.check(given["processed_inputs"], given["params"])
        validate_request(*args, **kwargs)

    platform.check_and_update_config = classmethod(preparing)
    platform.validate_request = classmethod(checking)


def _has_our_worker(vllm_config: "VllmConfig") -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from model_runner_base.worker import ModelRunnerWorker

    name = vllm_config.parallel_config.worker_cls
    if not isinstance(name, str):
        return issubclass(name, ModelRunnerWorker)
    if name == "auto" or name.startswith("vllm."):
        return False
    return issubclass(resolve_obj_by_qualname(name), ModelRunnerWorker)
