"""Choice of the interface that custom logits processors have."""

import torch
from vllm.config import VllmConfig

from model_runner_base.heads.sampling.custom_processors import CustomProcessors
from model_runner_base.heads.sampling.logits_processors import BatchProcessors
from model_runner_base.heads.sampling.slot_processors import SlotProcessors
from model_runner_base.vllm_compat.probes.config import uses_slot_processors
from model_runner_base.vllm_compat.probes.processors import has_custom_processors


def load_processors(vllm_config: VllmConfig, device: torch.device) -> CustomProcessors:
    """Loads the custom logits processors of a user and of plugins, which run on ``device``.

    Raises what vLLM raises if one cannot be loaded.
    """
    if uses_slot_processors(vllm_config) and has_custom_processors(vllm_config):
        return SlotProcessors(vllm_config, device)
    return BatchProcessors(vllm_config, device)
