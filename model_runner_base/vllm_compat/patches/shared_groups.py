"""Process groups that the engines in one process share.

vLLM makes them for the first engine, and from 0.33 on destroys them when any engine ends.
"""

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from vllm.config import ModelConfig
from vllm.distributed import parallel_state

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

_users: WeakSet[Any] = WeakSet()
"""Workers of the engines in this process that have not ended."""


def make_expert_groups(model_config: ModelConfig) -> None:
    """Has vLLM make the groups again if a model needs groups of experts, and those of an earlier engine lack them."""
    if model_config.is_moe and parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        destroy = parallel_state.destroy_model_parallel
        getattr(destroy, "__wrapped__", destroy)()


def use_groups(worker: Any) -> None:
    """Keeps vLLM's process groups until ``worker``, and each other one that uses them, has left them or is gone."""
    for name in ("destroy_model_parallel", "destroy_distributed_environment"):
        wrap_once(parallel_state, name, _unless_used)
    _users.add(worker)


def leave_groups(worker: Any) -> None:
    """Takes back ``use_groups``; vLLM 0.33 destroys the groups right after the last worker has left."""
    _users.discard(worker)


def _unless_used(destroy: Callable[[], None]) -> Callable[[], None]:
    @wraps(destroy)
    def destroy_unless_used() -> None:
        if _users:
            gc.collect()  # An engine that has not been ended may be in reference cycles.
        if not _users:
            destroy()

    return destroy_unless_used
