"""One model runner base for every device that serves LLMs with vLLM's V1 engine.

The names load on first use: most import vLLM's config, which asks for the platform, and a device's platform is itself a
subclass of ``model_runner_base.platform.PagedPlatform``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_runner_base.device_ops import DeviceOps, MemoryInfo
    from model_runner_base.model_runner import ModelRunnerBase
    from model_runner_base.models.loader import load_checkpoint
    from model_runner_base.platform import PagedPlatform
    from model_runner_base.runner.memory import DeviceMemoryProfiler
    from model_runner_base.runner.step_memory import estimate_step_memory
    from model_runner_base.step.graph_policy import BucketPolicy, GraphPolicy
    from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
    from model_runner_base.worker import ModelRunnerWorker

_HOMES = {
    "BucketPolicy": "step.graph_policy",
    "DeviceMemoryProfiler": "runner.memory",
    "DeviceOps": "device_ops",
    "GraphPolicy": "step.graph_policy",
    "MemoryInfo": "device_ops",
    "ModelRunnerBase": "model_runner",
    "ModelRunnerWorker": "worker",
    "PagedPlatform": "platform",
    "StepKind": "step.sizes",
    "StepLimits": "step.sizes",
    "StepSize": "step.sizes",
    "estimate_step_memory": "runner.step_memory",
    "load_checkpoint": "models.loader",
}

__all__ = [
    "BucketPolicy",
    "DeviceMemoryProfiler",
    "DeviceOps",
    "GraphPolicy",
    "MemoryInfo",
    "ModelRunnerBase",
    "ModelRunnerWorker",
    "PagedPlatform",
    "StepKind",
    "StepLimits",
    "StepSize",
    "estimate_step_memory",
    "load_checkpoint",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
