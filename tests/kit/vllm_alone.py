"""Imports vLLM and what the kit needs besides, and nothing of the base: for a fork server to preload.

vLLM's modules ask for the platform while they are imported. They get a stand-in, which is to become an object of the
device's own class where the base is imported.
"""

import gc
from contextlib import suppress
from importlib import import_module

import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum


class StandIn(Platform):
    """Answers what vLLM's modules ask of a platform while they are imported."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Imports no kernels, since vLLM is built without any."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Returns False, as the example device does: some of vLLM's modules keep the answer."""
        return False


PLATFORM = StandIn()
vllm.platforms._current_platform = PLATFORM

MODULES = [
    "hypothesis.stateful",
    "numba",
    "pytest",
    "ray",
    "rich.table",
    "scipy.stats",
    "torch._inductor.compile_fx",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.cli_args",
    "vllm.lora.layers",
    "vllm.lora.punica_wrapper.punica_gpu",
    "vllm.model_executor.models.config",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.registry",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
]
for module in MODULES:
    with suppress(ModuleNotFoundError):  # One vLLM has a module that another lacks.
        import_module(module)
# Elsewhere vLLM looks at a model's class in a process of its own, which imports all of this again.
vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()
# A fork copies the pages that the collector looks at.
gc.freeze()
