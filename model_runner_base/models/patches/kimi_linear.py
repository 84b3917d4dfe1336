"""Class of Kimi-Linear in newer releases of vLLM: the one of layers that are vLLM's own for every device.

vLLM 0.33 has two classes. The one that its registry names has layers of NVIDIA's kernels, which are in one piece with
their projections. The other one, which AMD's and Intel's devices get, has the layers that DeepSeek and Qwen3-Next have.
"""

from vllm import ModelRegistry
from vllm.config import VllmConfig

ARCHITECTURE = "KimiLinearForCausalLM"
PLAIN = "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM"


def use_plain_kimi_linear(vllm_config: VllmConfig) -> None:
    """Has vLLM make Kimi-Linear of plain layers; does nothing for other models and in older releases."""
    if vllm_config.model_config.architecture != ARCHITECTURE:
        return
    registered = ModelRegistry.models[ARCHITECTURE]
    if getattr(registered, "module_name", "").startswith("vllm.models.kimi_k3"):
        ModelRegistry.register_model(ARCHITECTURE, PLAIN)
