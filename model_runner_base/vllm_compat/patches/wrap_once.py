"""Wraps methods and functions of vLLM, each once in a process by the same wrapper."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

MARK = "_wrapped_by_model_runner_base"
"""Attribute of a wrapped method: names of its wrappers."""


def wrap_once(cls: type | ModuleType, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Puts ``wrapper(method)`` in the place of a method of a class, or of a function of a module, unless ``wrapper``
    did that before or the release has no such method.

    Several wrappers may wrap one method; the last one is called first.
    """
    method = getattr(cls, name, None)
    function = getattr(wrapper, "func", wrapper)  # That of a ``partial``.
    known_as = f"{function.__module__}.{function.__qualname__}"
    wrappers: frozenset[str] = getattr(method, MARK, frozenset())
    if method is None or known_as in wrappers:
        return
    wrapped = wrapper(method)
    setattr(getattr(wrapped, "__func__", wrapped), MARK, wrappers | {known_as})
    setattr(cls, name, wrapped)
