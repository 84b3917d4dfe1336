"""vLLM's recurrent layers, and the models that have them."""

from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase


def has_states(vllm_config: VllmConfig) -> bool:
    """Whether a model has recurrent layers, alone or among layers of attention."""
    model = vllm_config.model_config
    return bool(model and (model.is_attention_free or model.is_hybrid))


def recurrent_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Recurrent layers by name."""
    return get_layers_from_vllm_config(vllm_config, MambaBase)  # type: ignore[type-abstract]


def num_states(vllm_config: VllmConfig) -> int:
    """Number of states of each layer: one for each request that may run."""
    return vllm_config.scheduler_config.max_num_seqs
