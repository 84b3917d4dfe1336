"""Experts as vLLM makes them: those of its Transformers backend are compared, those without a gate allowed."""

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once
from model_runner_base.vllm_compat.probes.experts import ExpertsLayer, ExpertsView
from model_runner_base.vllm_compat.probes.models import uses_transformers_backend

BACKEND_MODULE = "vllm.model_executor.models.transformers.moe"

Adapt = Callable[[ExpertsView, nn.Module], None]
"""Function of vLLM's layer and of transformers' experts, whose weights are on the meta device. It adapts the layer, or
raises an error."""
_adapt: Adapt
"""Function for the models that are made from now on."""


def adapt_experts(model_configs: Iterable[ModelConfig], adapt: Adapt) -> None:
    """Has ``adapt`` called for each layer of experts that the backend makes; does nothing for other models.

    Layers of the backend are compared with the experts of transformers in whose place they are.

    The backend builds transformers' own model, and puts layers of vLLM's in place of the experts. These compute SwiGLU,
    whatever the class of transformers computes.
    """
    global _adapt
    if any(map(uses_transformers_backend, model_configs)):
        _adapt = adapt
        wrap_once(import_module(BACKEND_MODULE).MoEMixin, "recursive_replace", _adapted)


def _adapted(replace: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(replace)
    def recursive_replace(self: Any) -> None:
        experts = {name: part for name, part in self.model.named_modules() if name.rpartition(".")[2] == "experts"}
        replace(self)
        for name, own in experts.items():
            if isinstance(layer := self.model.get_submodule(name), ExpertsLayer):
                _adapt(ExpertsView(layer), own)

    return recursive_replace


def allow_experts_without_gate() -> None:
    """Has vLLM make experts without a gate (Nemotron-H) on every device; plain torch computes them.

    Later releases make them for devices with vLLM's own kernels alone.
    """
    wrap_once(FusedMoEConfig, "__post_init__", _without_refusal)


def _without_refusal(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(finish)
    def __post_init__(self: Any) -> None:
        try:
            finish(self)
        except NotImplementedError:  # Raised last, when all else of the configuration is set.
            if self.is_act_and_mul:
                raise

    return __post_init__
