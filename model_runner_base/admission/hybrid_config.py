"""Configurations of recurrent and hybrid models, where vLLM's do not fit states in tensors of their own."""

from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models import config as models_config
from vllm.transformers_utils import model_arch_config_convertor as convertors

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.types.recurrent import HAS_OTHER_DELTA_KERNELS, has_states, keeps_prefixes


def keep_block_size() -> None:
    """Leaves hybrid models the user's block size, which vLLM raises until a block is as large as a state.

    The cache mode is left open, too: some releases choose one that only kernels have, or refuse asynchronous scheduling
    in all modes but "none". ``choose_cache_mode`` chooses it.
    """

    def leave_open(vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        refusals = {
            "mamba_cache_mode=all is not supported: leave it out, and with enable_prefix_caching states are kept at "
            "the ends of blocks": cache.mamba_cache_mode == "all",
        }
        refuse(refusals)
        cache.mamba_cache_mode = "none"

    for each in (models_config.HybridAttentionMambaModelConfig, models_config.MambaModelConfig):
        each.verify_and_update_config = staticmethod(leave_open)  # type: ignore[assignment, method-assign]


def choose_cache_mode(vllm_config: VllmConfig) -> None:
    """Sets the mode of states: "align" if prefixes are kept, which keeps states at the ends of blocks, else "none".

    Raises UnsupportedConfigError if states are to be kept after another number of tokens, or if chunks of prompts
    cannot end with blocks. ``block_size`` must be set before.
    """
    if not has_states(vllm_config):
        return
    cache, scheduler, is_kept = vllm_config.cache_config, vllm_config.scheduler_config, keeps_prefixes(vllm_config)
    if cache.mamba_cache_mode == "all":
        # vLLM's own choice, with a size for its kernels, on a platform that does not leave it open.
        cache.mamba_block_size = None
    threshold, drafts = scheduler.long_prefill_token_threshold, vllm_config.speculative_config
    num_drafts = drafts.num_speculative_tokens if drafts else 0
    refusals = {
        f"mamba_block_size={cache.mamba_block_size} is not supported: leave it out, since states are kept at the ends "
        f"of blocks of block_size={cache.block_size} tokens": (
            is_kept and cache.mamba_block_size not in (None, cache.block_size)
        ),
        f"long_prefill_token_threshold={threshold} is less than block_size={cache.block_size}, at whose ends states "
        "are kept: raise it, or set enable_prefix_caching=False": is_kept and 0 < threshold < cache.block_size,
        f"num_speculative_tokens={num_drafts} is not less than block_size={cache.block_size}, at whose ends states are "
        "kept: lower it, or set enable_prefix_caching=False": is_kept and num_drafts >= (cache.block_size or 0) > 0,
        "a prefix of recurrent layers may end inside an image: leave out disable_chunked_mm_input, or set "
        "enable_prefix_caching=False": is_kept and scheduler.disable_chunked_mm_input,
        "prefixes of recurrent layers need chunks: leave out enable_chunked_prefill, or set "
        "enable_prefix_caching=False": is_kept and not scheduler.enable_chunked_prefill,
    }
    refuse(refusals)
    cache.mamba_cache_mode = "align" if is_kept else "none"


def know_mamba2() -> None:
    """Has vLLM read the configuration of Mamba 2, which has no heads of attention, as it reads that of Mamba."""
    known = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    known.setdefault("mamba2", known["mamba"])


def leave_prefix_caching_off() -> None:
    """Has vLLM leave prefix caching off for hybrid models unless it is asked for, as older releases do."""
    model_config: Any = ModelConfig
    supported = model_config.is_prefix_caching_supported.fget
    if not hasattr(supported, "before"):

        def is_prefix_caching_supported(self: ModelConfig) -> bool:
            return not self.is_hybrid and supported(self)

        is_prefix_caching_supported.before = supported  # type: ignore[attr-defined]
        model_config.is_prefix_caching_supported = property(is_prefix_caching_supported)


# ---- Recurrent layers that call vLLM's own kernels, on a device that has these ----

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
