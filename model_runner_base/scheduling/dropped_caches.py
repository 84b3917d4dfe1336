"""Calls of an engine core after which workers have empty KV caches: no request may run, and no prefix is kept.

vLLM's own ``sleep`` does both in later releases. A worker's ``sleep`` can also be called directly, by
``collective_rpc``, as trainers do.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from vllm.v1.engine.core import EngineCore

from model_runner_base.scheduling.releases import is_core_paused

DROPPING = ("sleep", "discard")
"""Methods of a worker that drop caches."""
MARK = "_forgets_dropped_caches"


def forget_dropped_caches() -> None:
    """Patches vLLM's engine core in this process. Further calls change nothing."""
    if hasattr(EngineCore.collective_rpc, MARK):
        return
    EngineCore.collective_rpc = _forgetting(EngineCore.collective_rpc, _drops_caches)  # type: ignore[method-assign]
    if "mode" not in signature(EngineCore.sleep).parameters:
        EngineCore.sleep = _forgetting(EngineCore.sleep, _always)  # type: ignore[method-assign]


def _drops_caches(method: Any, *args: Any, **kwargs: Any) -> bool:
    return method in DROPPING


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _forgetting(method: Any, drops_caches: Callable[..., bool]) -> Any:
    @wraps(method)
    def forgetting(core: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError if a request would lose its keys. Else calls the method and forgets all prefixes, even if
        the method fails: some workers may have dropped their caches before."""
        if not drops_caches(*args, **kwargs) or not getattr(core.scheduler, "reads_errors", False):
            return method(core, *args, **kwargs)
        scheduler = core.scheduler
        if scheduler.has_unfinished_requests() and not is_core_paused(core):
            raise ValueError("requests are running, and sleep drops their keys: end or abort them first")
        try:
            return method(core, *args, **kwargs)
        finally:
            scheduler.reset_prefix_cache(reset_running_requests=True)

    setattr(forgetting, MARK, True)
    return forgetting
