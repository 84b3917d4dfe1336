"""Processes that vLLM starts for an engine, which end when the process that started them is gone."""

import multiprocessing
from collections.abc import Callable
from functools import wraps
from typing import Any

from model_runner_base.orphans import end_with_this_process
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

IsOurs = Callable[[Any], bool]
"""Function of an engine's ``VllmConfig``: whether the engine is of this library."""


def end_servers_and_engines_with_this_process(is_ours: IsOurs) -> None:
    """Has processes of engine cores, and API servers next to them, end when this process is gone."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.utils import APIServerProcessManager

    wrap_once(CoreEngineProcManager, "__init__", lambda init: _ending(init, is_ours))
    # Servers that outlive it would keep the port, and answer nothing.
    wrap_once(APIServerProcessManager, "__init__", lambda init: _ending(init, lambda _: True))


def end_workers_with_this_process(is_ours: IsOurs) -> None:
    """Has the workers of an engine with several end when this process is gone; call it in a process of its core."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    wrap_once(WorkerProc, "make_worker_process", lambda make: staticmethod(_ending_worker(make, is_ours)))


def is_process_of_core() -> bool:
    """Whether vLLM started this process for an engine core."""
    return multiprocessing.current_process().name.startswith("EngineCore")


def _ending(init: Any, is_ours: IsOurs) -> Any:
    @wraps(init)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if is_ours(kwargs.get("vllm_config")):
            for process in self.processes:
                end_with_this_process(process)

    return start


def _ending_worker(make: Any, is_ours: IsOurs) -> Any:
    @wraps(make)
    def start(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        handle = make(vllm_config, *args, **kwargs)
        if is_ours(vllm_config):
            end_with_this_process(handle.proc)
        return handle

    return start
