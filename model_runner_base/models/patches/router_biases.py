"""Biases of routers that a checkpoint has with its experts, as Laguna's does; vLLM's loader of experts leaves them out.

Each expert's bias is added to its score before the best are chosen.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

NAME = "e_score_correction_bias"

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Any, Weights], Iterable[str]]


def load_router_biases() -> None:
    """Has vLLM load them; does nothing in releases whose experts do not load their own weights."""
    if experts := getattr(fused_moe, "RoutedExperts", None):
        wrap_once(experts, "load_weights", _with_bias)


def _with_bias(load: Load) -> Load:
    @wraps(load)
    def load_weights(self: Any, weights: Weights) -> Iterator[str]:
        loaded: list[str] = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name != NAME:
                    yield name, weight
                    continue
                if self.e_score_correction_bias is None:
                    raise ValueError(f"{self.layer_name}.{NAME}: vLLM's layer has no such bias")
                default_weight_loader(self.e_score_correction_bias, weight)
                loaded.append(name)

        yield from load(self, others())
        yield from loaded

    return load_weights
