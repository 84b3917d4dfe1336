"""Wraps methods and functions of vLLM, each once in a process."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

MARK = "_wrapped_by_model_runner_base"


def wrap_once(cls: type | ModuleType, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Puts ``wrapper(method)`` in the place of a method of a class, or of a function of a module, unless that was done
    before or the release has no such method."""
    method = getattr(cls, name, None)
    if method is None or hasattr(method, MARK):
        return
    wrapped = wrapper(method)
    setattr(getattr(wrapped, "__func__", wrapped), MARK, True)
    setattr(cls, name, wrapped)
