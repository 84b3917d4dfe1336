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
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from model_runner_base.admission.our_engines import is_ours
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


class RefusedCallError(HTTPException, ValueError):
    """Error of a call that this device does not follow: status 400 from a server, a ValueError from ``LLM``."""

    def __init__(self, message: str) -> None:
        super().__init__(status_code=400, detail=message)

    def __str__(self) -> str:
        return self.detail


CALLED_DIRECTLY = ("sleep", "discard")
"""Methods of a worker that free memory, which trainers call by ``collective_rpc``."""
UNREACHABLE = (EngineDeadError, TimeoutError)
"""Errors of calls that workers did not answer."""
MAY_SLEEP = "_may_sleep"
"""Attribute of an ``LLM``'s engine that was asked to sleep, and may not have been woken up since."""


AROUND = re.compile(
    r"(?:Call to \w+ method failed: )?(?:Worker failed with error ')?(.*?)(?:', please check the stack trace.*)?",
    re.DOTALL,
)
"""An error's text in a group, and what vLLM's engine and worker processes put around it."""
REFUSALS = re.compile(
    r"(?:this engine does not sleep|there is no sleep level|requests are running, and|unknown tags|weights sleep: call"
    r"|weights alone are not discarded|no weight has a name like|weight update refused|cannot load given weights).*"
    r"|.*(?:nothing was changed|: sleep at level 1)"
)
"""Errors of the engine and of its workers that are refusals of a call."""


def refuse_in_words() -> None:
    """Patches vLLM's two front ends. Call it in their process; further calls change nothing."""
    for name in ("sleep", "release_kv_cache_memory"):
        wrap_once(AsyncLLM, name, _if_workers_can_sleep_async)
        wrap_once(LLMEngine, name, _if_workers_can_sleep)
    wrap_once(LLMEngine, "collective_rpc", _noting_sleep)
    wrap_once(LLMEngine, "wake_up", _in_words)
    wrap_once(LLMEngine, "add_request", _while_awake)
    for name in ("collective_rpc", "compute_weight_checksums", "wake_up"):
        wrap_once(AsyncLLM, name, _in_words_async)


class _SleepCall:
    """Call of a front end's ``sleep`` or ``release_kv_cache_memory``: its level, and whether the engine can follow."""

    def __init__(self, method: Any) -> None:
        self._parameters = signature(method)
        # In releases with a ``mode`` for running requests, level 0 pauses the scheduler and leaves the device alone.
        self._has_pause_level = "mode" in self._parameters.parameters

    def level(self, engine: Any, *args: Any, **kwargs: Any) -> int | None:
        """Level that workers must be able to sleep at, None if they need not be asked; raises RefusedCallError if the
        engine was not started for sleep."""
        call = self._parameters.bind(engine, *args, **kwargs)
        call.apply_defaults()
        level = call.arguments.get("level", 1)
        if self._has_pause_level and level == 0:
            return None
        pause = " (level 0 pauses requests)" if self._has_pause_level else ""
        if not platforms.current_platform.is_sleep_mode_available():
            raise RefusedCallError(f"this device does not sleep: weights and KV cache stay in its memory{pause}")
        if not is_ours(engine.vllm_config):
            return None
        if not engine.vllm_config.model_config.enable_sleep_mode:
            raise RefusedCallError(f"this engine does not sleep: start it with enable_sleep_mode=True{pause}")
        return level


def _if_workers_can_sleep(method: Any) -> Any:
    call, sleep = _SleepCall(method), _in_words(method)

    @wraps(method)
    def asking(engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError, or calls the method and returns its result."""
        level = call.level(engine, *args, **kwargs)
        if level is not None:
            try:
                engine.collective_rpc("check_sleep", args=(level,))
            except UNREACHABLE:
                raise
            except Exception as error:
                raise RefusedCallError(_text_of(error)) from error
        setattr(engine, MAY_SLEEP, True)
        return sleep(engine, *args, **kwargs)

    return asking


def _if_workers_can_sleep_async(method: Any) -> Any:
    call, sleep = _SleepCall(method), _in_words_async(method)

    @wraps(method)
    async def asking(engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError, or calls the method and returns its result."""
        level = call.level(engine, *args, **kwargs)
        if level is not None:
            try:
                await engine.collective_rpc("check_sleep", args=(level,))
            except UNREACHABLE:
                raise
            except Exception as error:
                raise RefusedCallError(_text_of(error)) from error
        return await sleep(engine, *args, **kwargs)

    return asking


def _noting_sleep(method: Any) -> Any:
    call = _in_words(method)

    @wraps(method)
    def noting(engine: Any, *args: Any, **kwargs: Any) -> Any:
        called = args[0] if args else kwargs.get("method")
        if called in CALLED_DIRECTLY:
            setattr(engine, MAY_SLEEP, True)
        return call(engine, *args, **kwargs)

    return noting


def _while_awake(method: Any) -> Any:
    @wraps(method)
    def adding(engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError for a request to a sleeping engine, where ``LLM`` would wait for ever."""
        if getattr(engine, MAY_SLEEP, False) and is_ours(engine.vllm_config):
            _check_awake(engine)
        return method(engine, *args, **kwargs)

    return adding


def _check_awake(engine: Any) -> None:
    is_paused, tags = engine.is_sleeping(), engine.collective_rpc("sleeping_tags")[0]
    if is_paused or tags:
        what = f"{' and '.join(tags)} sleep" if tags else "requests are paused"
        call = "wake_up()" if is_paused else 'collective_rpc("wake_up")'
        raise RefusedCallError(f"{what}: call {call} before you send requests")
    setattr(engine, MAY_SLEEP, False)


def _in_words(method: Any) -> Any:
    @wraps(method)
    def calling(*args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError for what workers refuse, where the error itself is lost between processes."""
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if isinstance(error, ValueError) or not (refused := REFUSALS.search(_text_of(error))):
                raise
            raise RefusedCallError(refused[0]) from error

    return calling


def _in_words_async(method: Any) -> Any:
    @wraps(method)
    async def calling(*args: Any, **kwargs: Any) -> Any:
        """Raises RefusedCallError for what workers do not have, or refuse: methods, sleep, weights that do not fit."""
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            if missing := re.search("Method ('.*') is not implemented", str(error)):
                raise RefusedCallError(f"the workers of this device have no method {missing[1]}") from error
            if refused := REFUSALS.search(_text_of(error)):
                raise RefusedCallError(refused[0]) from error
            raise

    return calling


def _text_of(error: Exception) -> str:
    """Text of an error, which vLLM's processes send each other, without what they put around it."""
    match = AROUND.fullmatch(str(error))
    assert match is not None
    return match[1]
