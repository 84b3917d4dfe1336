"""Errors for clients of an engine that has ended: they come at once, and to each client.

When an engine core ends, vLLM 0.33 first ends the other replicas, which takes up to five seconds, and then tells
clients. When a front end ends, vLLM stops to read answers, and a client waits on whose answer had not come by then.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

IsOurs = Callable[[Any], bool]
"""Function of an engine's ``VllmConfig``: whether the engine is of this library."""
OURS = "is_of_this_library"
"""Attribute of the manager of the processes of an engine of this library."""


def give_errors_at_once(is_ours: IsOurs) -> None:
    """Has clients get an error as soon as an engine core has ended, and when their front end ends."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.utils import CoreEngineProcManager

    wrap_once(MPClient, "start_engine_core_monitor", lambda start: _marking_ours(start, is_ours))
    wrap_once(CoreEngineProcManager, "monitor_engine_liveness", _ending_others_meanwhile)
    wrap_once(AsyncLLM, "shutdown", lambda shutdown: _ending_requests(shutdown, is_ours))


def _marking_ours(start: Any, is_ours: IsOurs) -> Any:
    """Wraps the method that starts to watch engine cores, and marks the manager of an engine of this library."""

    @wraps(start)
    def start_marked(self: Any) -> None:
        manager = self.resources.engine_manager
        if manager is not None and is_ours(self.vllm_config):
            setattr(manager, OURS, True)
        start(self)

    return start_marked


def _ending_others_meanwhile(monitor: Any) -> Any:
    """Wraps the method that returns when an engine core has ended, and that ends the other cores first."""

    @wraps(monitor)
    def watch(self: Any) -> None:
        if not hasattr(self, OURS):
            monitor(self)
            return
        end, watcher = self.shutdown, threading.get_ident()

        def end_meanwhile(timeout: float | None = None) -> None:
            if threading.get_ident() != watcher or self.manager_stopped.is_set():
                end(timeout)
                return
            # Python waits for this thread before the process ends.
            threading.Thread(target=end, args=(timeout,), name="EndOfReplicas").start()
            self.shutdown = lambda timeout=None: None  # A second caller would wait as long.

        self.shutdown = end_meanwhile
        monitor(self)

    return watch


def _ending_requests(shutdown: Any, is_ours: IsOurs) -> Any:
    """Wraps the end of a front end so that requests without an answer end with an error."""

    @wraps(shutdown)
    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        shutdown(self, *args, **kwargs)
        handler = getattr(self, "output_handler", None)
        if handler is None or not is_ours(self.vllm_config) or handler.get_loop().is_closed():
            return
        # vLLM cancels the handler in the same way, before this.
        handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, EngineDeadError())

    return end
