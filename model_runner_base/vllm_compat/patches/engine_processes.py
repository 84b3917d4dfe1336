"""Processes of engine cores, which end when the front end that started them is gone."""

from functools import wraps
from typing import Any

from model_runner_base.orphans import end_with_this_process
from model_runner_base.our_engines import is_ours
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def end_engines_with_this_process() -> None:
    """Has the engine cores of this library end when this process is gone."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    wrap_once(CoreEngineProcManager, "__init__", _ending_with_this)


def _ending_with_this(init: Any) -> Any:
    @wraps(init)
    def start(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        init(self, *args, vllm_config=vllm_config, **kwargs)
        if is_ours(vllm_config):
            for process in self.processes:
                end_with_this_process(process)

    return start
