"""Servers that vLLM's tests start over HTTP: ``vllm serve`` in a process of its own, with the options of engines."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import psutil

from model_runner_base.testing.server import flags


def change_servers(server: Any, options: Callable[[list[str]], dict[str, Any]]) -> None:
    """Makes vLLM's ``RemoteOpenAIServer`` serve with other options, and leave no process.

    vLLM 0.16 leaves the server if its start fails, and processes that the server started if it is slow to end.

    Args:
        server: the class.
        options: options of an engine by name, given the arguments of a server.
    """
    init: Callable[..., None] = server.__init__
    leave: Callable[..., None] = server.__exit__

    @wraps(init)
    def with_options(self: Any, model: str, vllm_serve_args: list[str], *args: Any, **named: Any) -> None:
        given = [str(argument) for argument in vllm_serve_args]
        chosen = options(given)
        if "seed" in chosen and "--seed" not in given:
            named["seed"] = chosen.pop("seed")  # The class has an argument for it, and refuses the flag next to it.
        try:
            init(self, model, [*given, *flags(chosen)], *args, **named)
        except BaseException:
            if (process := getattr(self, "proc", None)) is not None:
                end(tree_of(process.pid))
            raise

    @wraps(leave)
    def and_end_all(self: Any, *error: Any) -> None:
        tree = tree_of(self.proc.pid)
        try:
            leave(self, *error)
        finally:
            end(tree)

    server.__init__, server.__exit__ = with_options, and_end_all


def tree_of(pid: int) -> list[psutil.Process]:
    """A process, and those that it started; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process]) -> None:
    """Ends processes at once, if they still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
