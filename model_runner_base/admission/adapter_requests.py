"""Loads adapters before the first request that names them is queued, so that only that request is refused.

vLLM loads an adapter within the first step that runs with it. An error would be raised there, in the step of all
requests, and again in every later step, since the request stays queued.
"""

from functools import wraps
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from model_runner_base.admission.our_engines import is_ours
from model_runner_base.errors import RequestError
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

KNOWN = "_adapters_that_were_loaded"
"""Attribute of a front end that holds the adapters that its workers have loaded."""


def load_adapters_first() -> None:
    """Patches vLLM's two front ends. Call it in their process; further calls change nothing."""
    wrap_once(LLMEngine, "add_request", _loading)
    wrap_once(AsyncLLM, "add_request", _loading_async)


def _loading(add_request: Any) -> Any:
    @wraps(add_request)
    def loading(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RequestError for an adapter that cannot serve, before the request is queued."""
        request = _unknown(self, prompt, kwargs)
        if request is not None:
            try:
                self.add_lora(request)
            except Exception as error:
                raise _refusal(error) from error
            _note(self, request)
        return add_request(self, request_id, prompt, *args, **kwargs)

    return loading


def _loading_async(add_request: Any) -> Any:
    @wraps(add_request)
    async def loading(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RequestError for an adapter that cannot serve, before the request is queued."""
        request = _unknown(self, prompt, kwargs)
        if request is not None and not self.errored:
            try:
                await self.add_lora(request)
            except Exception as error:
                if self.errored:
                    raise
                raise _refusal(error) from error
            _note(self, request)
        return await add_request(self, request_id, prompt, *args, **kwargs)

    return loading


def _unknown(front_end: Any, prompt: Any, options: dict[str, Any]) -> LoRARequest | None:
    """Adapter that a request names, unless this front end has loaded it before."""
    request = options.get("lora_request") or getattr(prompt, "lora_request", None)
    if request is None or front_end.vllm_config.lora_config is None or not is_ours(front_end.vllm_config):
        return None
    return None if _key(request) in front_end.__dict__.get(KNOWN, ()) else request


def _note(front_end: Any, request: LoRARequest) -> None:
    front_end.__dict__.setdefault(KNOWN, set()).add(_key(request))


def _key(request: LoRARequest) -> tuple[int, str, str]:
    return request.lora_int_id, request.lora_name, request.lora_path


def _refusal(error: Exception) -> RequestError:
    """Makes a RequestError from an error, which an engine in another process sends as text."""
    return RequestError(str(error).removeprefix("Call to add_lora method failed: "))
