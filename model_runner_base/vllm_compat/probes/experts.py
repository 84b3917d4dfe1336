"""vLLM's mixture-of-experts layers, which are one module in some releases and three in others, as one view.

``FusedMoE`` has the weights, chooses the experts, adds the shared experts and reduces over the ranks. Where it is gone,
``MoERunner`` does so, and a ``RoutedExperts`` below it has the weights.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers import fused_moe

IS_ONE_MODULE = isinstance(getattr(fused_moe, "FusedMoE", None), type)  # Between the two it is a function.

ExpertsLayer: Any = getattr(fused_moe, "FusedMoE" if IS_ONE_MODULE else "MoERunner")
"""The module that a model calls with hidden states and the router's logits."""

ChooseAndRun = Callable[["ExpertsView", torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer, hidden states [T, hidden] and the router's logits [T, experts]: the sum of the routed experts."""


class ExpertsView:
    """One layer: every attribute of vLLM's by its name, from the module that has it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.weights = module if IS_ONE_MODULE else module.routed_experts
        """The module that has the weights and their ``quant_method``."""

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        return getattr(own["module"], name) if hasattr(own["module"], name) else getattr(own["weights"], name)

    @property
    def activation(self) -> str:
        return activation_name(self.weights)

    @property
    def use_ep(self) -> bool:
        return self.moe_config.moe_parallel_config.use_ep

    @property
    def is_sequence_parallel(self) -> bool:
        return (self.module if IS_ONE_MODULE else self.moe_config).is_sequence_parallel

    @property
    def asks_for_more(self) -> str | None:
        """A setting of the weights' module that plain torch does not follow; None where there is none."""
        limit = getattr(self.weights, "swiglu_limit", None)
        limits = (None, 7.0) if self.activation == "swigluoai" else (None,)
        wanted = {
            f"swiglu_limit={limit}": limit not in limits,
            "hash routing": getattr(self.weights, "hash_indices_table", None) is not None,
        }
        return next((what for what, is_wanted in wanted.items() if is_wanted), None)

    @property
    def has_own_forward(self) -> bool:
        """Whether a model derived a class that runs otherwise."""
        usual = (fused_moe.FusedMoE, fused_moe.SharedFusedMoE) if IS_ONE_MODULE else (ExpertsLayer,)
        return type(self.module).forward not in [each.forward for each in usual]

    def use(self, method: Any, choose_and_run: ChooseAndRun) -> None:
        """Has the layer run by ``choose_and_run``, on weights that ``method`` has laid out."""
        if IS_ONE_MODULE:
            self.module.quant_method = method
            # What vLLM's own dispatch by platform sets. Models name the arguments, or do not.
            self.module._forward_method = partial(self._whole, choose_and_run)
        else:
            self.weights.quant_method = method
            self.module._forward_entry = partial(self._inner, choose_and_run)
        method.process_weights_after_loading(self.weights)

    def _whole(
        self, choose_and_run: ChooseAndRun, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What ``FusedMoE.forward`` returns: the experts' sum, behind the output of shared experts if there are any."""
        layer = self.module
        shared = None if layer.shared_experts is None else layer.shared_experts(hidden_states)
        out = choose_and_run(self, layer.apply_routed_input_transform(hidden_states), router_logits)
        return self._reduced(out) if shared is None else (self._reduced(shared), self._reduced(out))

    def _reduced(self, states: torch.Tensor) -> torch.Tensor:
        layer = self.module
        return tensor_model_parallel_all_reduce(states) if layer.reduce_results and layer.tp_size > 1 else states

    def _inner(
        self,
        choose_and_run: ChooseAndRun,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        shared_input: torch.Tensor | None,
        *_: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What ``MoERunner.forward`` calls: transforms, sums and reductions around it are its own."""
        shared = self.module.shared_experts
        shared_out = None if shared is None else shared._layer(shared_input)
        out = choose_and_run(self, hidden, logits)
        return out if shared_out is None else (shared_out, out)


def activation_name(weights: Any) -> str:
    """Of the module that has the weights: the name that checkpoints have for its activation."""
    return getattr(weights.activation, "value", weights.activation)


def experts_layers(model: nn.Module) -> Iterator[tuple[str, ExpertsView]]:
    """Every mixture-of-experts layer of a model, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLayer):
            yield name, ExpertsView(module)
