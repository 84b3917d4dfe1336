"""A whole device in one file: torch's own CPU, eager, under vLLM's V1 engine.

    python examples/plain_device.py [MODEL]     some text from a local checkpoint, the bundled one if left out

Tests and benchmarks run on it. For a device of your own, copy the package ``examples/acme_device`` instead, which
docs/new_device/tutorial.md makes step by step.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from model_runner_base.platform import PagedPlatform


class PlainPlatform(PagedPlatform):
    """Answers to what vLLM asks about the device before it starts."""

    device_name = "cpu"
    device_type = "cpu"
    worker_cls = f"{__name__}.PlainWorker"
    ray_device_key = "GPU"  # Ray counts as many as it is told: ``ray start --num-gpus 2``.
    serves_stages = True
    serves_replicas = True
    serves_expert_replicas = True
    serves_decode_context = True

    @classmethod
    def serves_connectors(cls, vllm_config: Any) -> bool:
        """Returns True: caches stay the same tensors, and torch's CPU compiles nothing."""
        return True


def __getattr__(name: str) -> Any:
    """The runner and the worker, made when vLLM first asks this module for one of them.

    Their bases import vLLM's config, which itself imports this module for the platform above. A package puts them in a
    file of their own instead.
    """
    if name not in ("PlainModelRunner", "PlainWorker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global PlainModelRunner, PlainWorker
    from model_runner_base import ModelRunnerBase, ModelRunnerWorker, estimate_step_memory, load_checkpoint

    class PlainModelRunner(ModelRunnerBase):
        """The four hooks."""

        def _cache_device_properties(self) -> None:
            """Installs nothing: the base's DeviceOps and its eager GraphPolicy serve a plain torch device."""

        def load_model(self) -> None:
            self.model = load_checkpoint(self.vllm_config).to(self.device)

        def profile_run(self) -> int:
            """Estimates a step's bytes; a device that reports peak memory would run its largest step and measure."""
            limits = self.step_limits()
            replicas = self.vllm_config.parallel_config.data_parallel_size
            return estimate_step_memory(
                limits.largest_sizes, limits, self.get_kv_cache_spec(), self.model_config, num_replicas=replicas
            )

        def capture_model(self) -> None:
            """Captures nothing; runs the largest steps once, on padding, so that their errors show before serving."""
            self.warm_up(self.step_limits().largest_sizes)

    class PlainWorker(ModelRunnerWorker):
        """Names the runner and its torch device."""

        model_runner_cls = PlainModelRunner  # type: ignore[name-defined]

        def make_device(self) -> torch.device:
            return torch.device("cpu")

    return globals()[name]


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm.platforms

    # Takes the place of an entry point, which a script has not; set before vLLM asks for the platform.
    vllm.platforms.current_platform = PlainPlatform()
    from vllm import LLM, SamplingParams

    bundled = Path(__file__).parent / "models" / "kjv-2m"
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else str(bundled))
    prompts = ["In the beginning God created", "And it came to pass, when the king heard", "A wise man"]
    for output in llm.generate(prompts, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=48, seed=0)):
        print(f"\n{output.prompt}\033[1m{output.outputs[0].text}\033[0m")


if __name__ == "__main__":
    main()
