"""Differences between vLLM's releases on CUDA: the only file of this package that asks for them.

``model_runner_base/vllm_compat/`` does the same for all devices.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.mem_constants import GiB_bytes


def init_batch_invariance(vllm_config: VllmConfig) -> None:
    """Switches to kernels whose results do not depend on the batch, if the user's environment asks for them."""
    if find_spec("vllm.model_executor.determinism"):
        import_module("vllm.model_executor.determinism.batch_invariant").init_batch_invariance()
    else:
        layers = import_module("vllm.model_executor.layers.batch_invariant")
        layers.init_batch_invariance(vllm_config.attention_config.backend)


def prepare_offloading(vllm_config: VllmConfig) -> None:
    """Tells vLLM which weights are to stay on the host; to be called before the model is made."""
    config: Any = vllm_config
    if hasattr(config, "offload_config"):
        offloader = import_module("vllm.model_executor.offloader")
        offloader.set_offloader(offloader.create_offloader(config.offload_config))
    else:
        models = import_module("vllm.model_executor.models.utils")
        models.set_cpu_offload_max_bytes(int(config.cache_config.cpu_offload_gb * GiB_bytes))


def compile_range_ends(vllm_config: VllmConfig) -> list[int] | None:
    """The config's own list of the token counts at which ranges end; vLLM compiles for each range separately."""
    config: Any = vllm_config.compilation_config
    name = "compile_ranges_endpoints"
    return getattr(config, name if hasattr(config, name) else "compile_ranges_split_points")
