"""Checks of the towers of a family that was not tried, made while an engine starts and not by its first request."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.tower_placement import towers_of


def check_tower_layers(vllm_config: VllmConfig, model: Any) -> None:
    """Raises UnsupportedConfigError if a tower has layers that need a step's attention metadata.

    Without it vLLM's attention layers return zeros.
    """
    if not towers_of(model):
        raise UnsupportedConfigError(
            f"{type(model).__name__} is not supported yet, since vLLM's class does not say which of its modules are "
            "towers: use its text alone"
        )
    needing = {id(layer) for layer in vllm_config.compilation_config.static_forward_context.values()}
    for tower in towers_of(model):
        for name, module in tower.named_modules():
            if id(module) in needing:
                raise UnsupportedConfigError(
                    f"{type(model).__name__} is not supported yet, since layer {name} of its {type(tower).__name__} "
                    "needs the attention metadata of a step: use its text alone"
                )


def check_outputs(model: Any, outputs: Sequence[torch.Tensor], width: int) -> None:
    """Raises UnsupportedConfigError unless a tower's outputs, of an item each, have rows of ``width`` numbers."""
    for output in outputs:
        if output.shape[-1] != width:
            raise UnsupportedConfigError(
                f"{type(model).__name__} is not supported yet, since its towers make rows of {output.shape[-1]} "
                f"numbers, and its text model takes {width}: use its text alone"
            )
