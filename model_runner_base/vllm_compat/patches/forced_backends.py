"""Attention backends that vLLM forces upon a model, because its own kernels need them; plain torch does not."""

from collections.abc import Callable
from typing import Any

from vllm.model_executor.models import config as models_config

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def leave_backend_open() -> None:
    """Has the configurations of Gemma 4, whose layers have two head sizes, leave the backend to the platform.

    A backend that the user chose stays.
    """
    for name in ("Gemma4Config", "EmbeddingGemma2ModelConfig"):
        config = getattr(models_config, name, None)
        if config is not None:
            wrap_once(config, "verify_and_update_config", _without_choice)


def _without_choice(verify: Callable[[Any], None]) -> Any:
    def verify_and_update_config(vllm_config: Any) -> None:
        chosen = vllm_config.attention_config.backend
        verify(vllm_config)
        vllm_config.attention_config.backend = chosen

    return staticmethod(verify_and_update_config)
