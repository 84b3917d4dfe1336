"""What vLLM has at one place or another on CUDA: the only file of this package that asks.

``model_runner_base/vllm_compat/`` is the same for all devices.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.mem_constants import GiB_bytes


def init_batch_invariance(vllm_config: VllmConfig) -> None:
    """Kernels whose results do not depend on the batch, where the user's environment asks for them."""
    if find_spec("vllm.model_executor.determinism"):
        import_module("vllm.model_executor.determinism.batch_invariant").init_batch_invariance()
    else:
        layers = import_module("vllm.model_executor.layers.batch_invariant")
        layers.init_batch_invariance(vllm_config.attention_config.backend)


def prepare_offloading(vllm_config: VllmConfig) -> None:
    """Before the model is made: which of its weights are to stay on the host."""
    config: Any = vllm_config
    if hasattr(config, "offload_config"):
        offloader = import_module("vllm.model_executor.offloader")
        offloader.set_offloader(offloader.create_offloader(config.offload_config))
    else:
        models = import_module("vllm.model_executor.models.utils")
        models.set_cpu_offload_max_bytes(int(config.cache_config.cpu_offload_gb * GiB_bytes))


def compile_range_ends(vllm_config: VllmConfig) -> list[int] | None:
    """Numbers of tokens at which ranges end that vLLM compiles for, each apart."""
    config: Any = vllm_config.compilation_config
    name = "compile_ranges_endpoints"
    return getattr(config, name if hasattr(config, name) else "compile_ranges_split_points")
