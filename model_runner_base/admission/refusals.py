"""Refuses calls that the device cannot follow, such as those of a server's development routes, and says why.

vLLM's server answers with status 500 if a call fails in the engine, and some releases say nothing more. In later
releases a sleep that fails there leaves the scheduler paused, and no request is served until a wake-up.
"""

import re
from functools import wraps
from inspect import signature
from typing import Any

from fastapi import HTTPException
from vllm import platforms
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


class RefusedCallError(HTTPException, ValueError):
    """Error of a call that this device does not follow: status 400 from a server, a ValueError from ``LLM``."""

    def __init__(self, message: str) -> None:
        super().__init__(status_code=400, detail=message)

    def __str__(self) -> str:
        return self.detail


def refuse_in_words() -> None:
    """Patches vLLM's two front ends. Call it in their process; further calls change nothing."""
    for name in ("sleep", "release_kv_cache_memory"):
        wrap_once(AsyncLLM, name, _unless_the_device_sleeps)
        wrap_once(LLMEngine, name, _unless_the_device_sleeps)
    for name in ("collective_rpc", "compute_weight_checksums"):
        wrap_once(AsyncLLM, name, _naming_missing_methods)


def _unless_the_device_sleeps(method: Any) -> Any:
    parameters = signature(method)
    # In releases with a ``mode`` for running requests, level 0 pauses the scheduler and leaves the device alone.
    has_pause_level = "mode" in parameters.parameters

    def check(*args: Any, **kwargs: Any) -> None:
        level = parameters.bind(*args, **kwargs).arguments.get("level")
        if platforms.current_platform.is_sleep_mode_available() or (has_pause_level and level == 0):
            return
        pause = " (level 0 pauses requests)" if has_pause_level else ""
        raise RefusedCallError(f"this device does not sleep: weights and KV cache stay in its memory{pause}")

    @wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError, or calls the method and returns its result, in the async front end a coroutine."""
        check(*args, **kwargs)
        return method(*args, **kwargs)

    return checked


def _naming_missing_methods(method: Any) -> Any:
    @wraps(method)
    async def naming(*args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError for a method that the workers do not have."""
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            # An engine sends its errors as text.
            missing = re.search("Method ('.*') is not implemented", str(error))
            if missing is None:
                raise
            raise RefusedCallError(f"the workers of this device have no method {missing[1]}") from error

    return naming
