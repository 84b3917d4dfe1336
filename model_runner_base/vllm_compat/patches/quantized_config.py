"""Calls a function before vLLM chooses a method for a quantised checkpoint, or refuses the model's dtype for it."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from vllm.config import ModelConfig
from vllm.platforms import current_platform

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def before_a_method_is_chosen(action: Callable[[ModelConfig, Collection[str]], None]) -> None:
    """Calls ``action`` for each config of a model, a draft's too, with the methods that the platform has kernels for.

    It is called after the config has read that of the checkpoint, and before the method is looked up.
    """

    def wrapper(verify: Any) -> Any:
        @wraps(verify)
        def verify_quantization(self: Any) -> None:
            action(self, current_platform.supported_quantization)
            verify(self)

        return verify_quantization

    wrap_once(ModelConfig, "_verify_quantization", wrapper)
