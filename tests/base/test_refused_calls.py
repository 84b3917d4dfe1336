"""Refusals of calls that vLLM's front ends take: which errors they are, in whichever process the engine is."""

import asyncio
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from model_runner_base.admission import refusals
from model_runner_base.admission.refusals import RefusedCallError

REFUSAL = "weights sleep: call wake_up"
IN_WORKER = RuntimeError(f"Worker failed with error '{REFUSAL}', please check the stack trace above for the root cause")
IN_ENGINE = Exception(f"Call to collective_rpc method failed: {REFUSAL}")
IN_BOTH = Exception(f"Call to collective_rpc method failed: {IN_WORKER}")


class Engine:
    """Stand-in for ``LLMEngine`` or ``AsyncLLM``, whose workers answer a call with an error."""

    vllm_config: Any = None

    def __init__(self, error: Exception) -> None:
        self._error = error

    def collective_rpc(self, method: str, args: tuple = ()) -> Any:
        raise self._error

    def sleep(self, level: int = 1) -> None:
        raise AssertionError("vLLM was asked to sleep")


class AsyncEngine(Engine):
    async def collective_rpc(self, method: str, args: tuple = ()) -> Any:
        raise self._error

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        raise AssertionError("vLLM was asked to sleep")


def sleep(error: Exception, is_async: bool) -> None:
    """Calls ``sleep`` of a front end whose ``check_sleep`` raises an error."""
    if is_async:
        asyncio.run(refusals._if_workers_can_sleep_async(AsyncEngine.sleep)(AsyncEngine(error)))
    else:
        refusals._if_workers_can_sleep(Engine.sleep)(Engine(error))


def rpc(error: Exception, is_async: bool) -> None:
    """Calls ``collective_rpc`` of a front end."""
    if is_async:
        asyncio.run(refusals._in_words_async(AsyncEngine.collective_rpc)(AsyncEngine(error), "reload_weights"))
    else:
        refusals._noting_sleep(Engine.collective_rpc)(Engine(error), "reload_weights")


@pytest.fixture(autouse=True)
def engines_can_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals._SleepCall, "level", lambda *args, **kwargs: 1)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("call", [sleep, rpc])
@pytest.mark.parametrize("error", [RuntimeError(REFUSAL), IN_WORKER, IN_ENGINE, IN_BOTH])
def test_a_refusal_is_the_same_in_whichever_process(error: Exception, call: Any, is_async: bool) -> None:
    with pytest.raises(RefusedCallError) as raised:
        call(error, is_async)
    assert str(raised.value) == REFUSAL and raised.value.status_code == 400


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("call", [sleep, rpc])
@pytest.mark.parametrize("error", [EngineDeadError(), TimeoutError("RPC call to check_sleep timed out.")])
def test_workers_that_do_not_answer_refuse_nothing(error: Exception, call: Any, is_async: bool) -> None:
    with pytest.raises(type(error)):
        call(error, is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_fails_is_not_refused(is_async: bool) -> None:
    error = Exception("Call to collective_rpc method failed: CUDA out of memory")
    with pytest.raises(Exception, match="out of memory") as raised:
        rpc(error, is_async)
    assert raised.value is error
