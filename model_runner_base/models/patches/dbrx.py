"""Checkpoints of DBRX, whose experts vLLM 0.33 looks for under the names that they had in earlier releases."""

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from vllm.config import VllmConfig

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

ARCHITECTURE = "DbrxForCausalLM"
MODULE = "vllm.model_executor.models.dbrx"
WRITTEN, MEANT = ".ffn.experts.mlp.", ".ffn.experts.routed_experts.mlp."

Weights = Iterable[tuple[str, torch.Tensor]]


def load_dbrx(vllm_config: VllmConfig) -> None:
    """Has vLLM load DBRX; does nothing for other models, and where experts have the names of the checkpoint."""
    if vllm_config.model_config.architecture != ARCHITECTURE:
        return
    models: Any = import_module(MODULE)
    if hasattr(models, "RoutedExperts"):
        wrap_once(models.DbrxModel, "load_weights", _with_experts_names)


def _with_experts_names(load: Callable[[Any, Weights], set[str]]) -> Callable[[Any, Weights], set[str]]:
    @wraps(load)
    def load_weights(self: Any, weights: Weights) -> set[str]:
        return load(self, ((name.replace(WRITTEN, MEANT), weight) for name, weight in weights))

    return load_weights
