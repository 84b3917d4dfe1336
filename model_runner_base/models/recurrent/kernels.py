"""Recurrent layers that call vLLM's own kernels: what they are served with on a device that has these."""

from vllm.config import VllmConfig

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.types.recurrent import HAS_OTHER_DELTA_KERNELS

UNTRIED = (
    "KimiLinearForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    *(["Qwen3NextForCausalLM"] if HAS_OTHER_DELTA_KERNELS else []),
)
"""Architectures with lightning attention or decays of channels, or with gated delta nets of newer releases."""


def check_kernels(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what vLLM's kernels of recurrent layers are not served with yet."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    refusals = {
        f"{model.architecture} was not tried with vLLM's kernels of recurrent layers: use another model": (
            model.architecture in UNTRIED or model.is_multimodal_model
        ),
        "prefix caching is not supported with vLLM's kernels of recurrent layers yet: set "
        "enable_prefix_caching=False": cache.enable_prefix_caching,
        "speculative decoding is not supported with vLLM's kernels of recurrent layers yet: leave out "
        "speculative_config": vllm_config.speculative_config,
        "adapters are not supported with vLLM's kernels of recurrent layers yet: leave out enable_lora": (
            vllm_config.lora_config
        ),
        "states that are written every few tokens are not supported yet: leave out use_replayssm": (
            setting(vllm_config, "cache_config.use_replayssm", False)
        ),
    }
    refuse(refusals)
