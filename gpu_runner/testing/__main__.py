"""The conformance kit against gpu_runner.GPUWorker on this host's GPU, also where vLLM has no kernels.

    python -m gpu_runner.testing [OPTIONS OF THE KIT]

such as ``-k hostile``; benchmarks/gpu_hardware.md says how to reach a host without network. Without vLLM's kernels
kernels.py stands in. Graphs are captured for decodes and models are not compiled, so an engine starts in seconds.
Where the host lacks xgrammar, leave the rows of structured output out.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

# A worker of this library on vLLM's own CUDA platform.
os.environ["VLLM_NEURON_RUNNER"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

from gpu_runner.testing import kernels

T = TypeVar("T")
OPTIONS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def run_here(fn: Callable[[], T]) -> T:
    return fn()


def takes_any_size(head_size: int) -> bool:
    return True


def without_kernels() -> dict[str, Any]:
    """Engine options without kernels. Models are inspected in this process: another one would lack the stand-ins."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = run_here
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    # The kit's heads have 16 numbers, fewer than vLLM chooses the backend for; its kernels take them.
    TritonAttentionBackend.supports_head_size = takes_any_size  # type: ignore[method-assign]
    return kernels.ENGINE_OPTIONS | {"compilation_config": OPTIONS["compilation_config"] | kernels.COMPILATION}


def main(arguments: list[str]) -> int:
    options = without_kernels() if kernels.stand_in() else OPTIONS
    from model_runner_base.admission import front_end
    from model_runner_base.testing.__main__ import main as run_kit

    front_end.register()  # Where this distribution is not installed, vLLM finds no entry point of it.

    return run_kit(["gpu_runner.GPUWorker", "--engine-options", json.dumps(options), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
