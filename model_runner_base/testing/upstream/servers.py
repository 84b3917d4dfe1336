"""Servers that vLLM's tests start over HTTP: ``vllm serve`` in a process of its own, with the options of engines."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any


def change_servers(server: Any, options: Callable[[list[str]], dict[str, Any]]) -> None:
    """Makes vLLM's ``RemoteOpenAIServer`` serve with other options, and end its processes if the start fails.

    Args:
        server: the class.
        options: options of an engine by name, given the arguments of a server.
    """
    init: Callable[..., None] = server.__init__

    @wraps(init)
    def with_options(self: Any, model: str, vllm_serve_args: list[str], *args: Any, **named: Any) -> None:
        given = [str(argument) for argument in vllm_serve_args]
        try:
            init(self, model, [*given, *as_arguments(options(given))], *args, **named)
        except BaseException:
            if (process := getattr(self, "proc", None)) is not None:
                end_tree(process.pid)
            raise

    server.__init__ = with_options


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Arguments of ``vllm serve`` for options of an engine: ``{"enforce_eager": True}`` is ``--enforce-eager``."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def end_tree(pid: int) -> None:
    """Ends a process, and those that it started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
