"""One model runner base for every device that serves LLMs with vLLM's V1 engine."""

from model_runner_base.device_ops import DeviceOps, MemoryInfo
from model_runner_base.graph_policy import BucketPolicy, GraphPolicy, GraphSize, StepLimits
from model_runner_base.memory import DeviceMemoryProfiler
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.worker import ModelRunnerWorker

__all__ = [
    "BucketPolicy",
    "DeviceMemoryProfiler",
    "DeviceOps",
    "GraphPolicy",
    "GraphSize",
    "MemoryInfo",
    "ModelRunnerBase",
    "ModelRunnerWorker",
    "StepLimits",
]
