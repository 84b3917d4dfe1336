"""Configurations of recurrent and hybrid models, where vLLM's do not fit states in tensors of their own."""

from vllm.model_executor.models import config as models_config
from vllm.transformers_utils import model_arch_config_convertor as convertors


def keep_block_size() -> None:
    """Leaves hybrid models the user's block size, which vLLM raises until a block is as large as a state."""
    hybrid, recurrent = models_config.HybridAttentionMambaModelConfig, models_config.MambaModelConfig
    hybrid.verify_and_update_config = recurrent.verify_and_update_config  # type: ignore[method-assign]


def know_mamba2() -> None:
    """Has vLLM read the configuration of Mamba 2, which has no heads of attention, as it reads that of Mamba."""
    known = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    known.setdefault("mamba2", known["mamba"])
