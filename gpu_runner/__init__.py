"""vLLM on CUDA GPUs over the shared base: ``vllm serve MODEL --worker-cls gpu_runner.GPUWorker``.

vLLM's CUDA platform, attention backends, kernels and compilation stay as they are; the worker and the runner are ours.
The names load on first use: vLLM imports this package before it has a config.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_runner.model_runner import GPUModelRunner
    from gpu_runner.worker import GPUWorker

__all__ = ["GPUModelRunner", "GPUWorker"]


def __getattr__(name: str) -> Any:
    if name == "GPUModelRunner":
        from gpu_runner.model_runner import GPUModelRunner

        return GPUModelRunner
    if name == "GPUWorker":
        from gpu_runner.worker import GPUWorker

        return GPUWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
