"""Parts of pytest-asyncio and tblib that vLLM's tests use, where those are not installed."""

import asyncio
import inspect
import sys
from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def provide() -> None:
    """Makes the modules, before anything of vLLM's tests is imported."""
    if find_spec("tblib") is None:
        package, support = ModuleType("tblib"), ModuleType("tblib.pickling_support")
        # Names errors of other processes.
        support.install = lambda: None  # type: ignore[attr-defined]
        package.pickling_support = support  # type: ignore[attr-defined]
        sys.modules |= {"tblib": package, "tblib.pickling_support": support}
    if find_spec("pytest_asyncio") is None:
        module = ModuleType("pytest_asyncio")
        module.fixture = _fixture  # type: ignore[attr-defined]
        sys.modules["pytest_asyncio"] = module


def _fixture(function: Any = None, **_: Any) -> Any:
    """A fixture of one test, since each test has an event loop of its own. The test awaits its value."""
    if function is None:
        return _fixture

    @pytest.fixture
    @wraps(function)
    def not_awaited(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return not_awaited


class AsyncTests:
    """Runs asynchronous tests, each in an event loop of its own. Their asynchronous fixtures are those of a test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        # pytest-asyncio puts another function in the place of an asynchronous one.
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        asyncio.run(_run(pyfuncitem))
        return True


async def _run(test: pytest.Function) -> None:
    arguments: dict[str, Any] = {}
    generators = []
    for name in inspect.signature(test.obj).parameters:
        value = test.funcargs[name]
        if inspect.isasyncgen(value):
            generators.append(value)
            value = await anext(value)
        elif inspect.iscoroutine(value):
            value = await value
        arguments[name] = value
    try:
        await test.obj(**arguments)
    finally:
        for generator in reversed(generators):
            await anext(generator, None)
