"""A view of vLLM's mixture-of-experts layers, which are one module in some releases and three in others.

``FusedMoE`` has the weights, chooses the experts, adds the shared experts and reduces over the ranks. In releases
without it, ``MoERunner`` does so, and a ``RoutedExperts`` below it has the weights.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers import fused_moe

IS_ONE_MODULE = isinstance(getattr(fused_moe, "FusedMoE", None), type)  # In releases between, it is a function.

ExpertsLayer: Any = getattr(fused_moe, "FusedMoE" if IS_ONE_MODULE else "MoERunner")
"""The module that a model calls with hidden states and the router's logits."""

try:
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
except ImportError:  # Older releases compute such experts in a layer class of their own.
    ZeroExpertRouter = None
"""Router of a layer in which experts without weights return their input; None in releases without it."""

LIMITED_SILU = "silu_limited"
"""Name of "silu" with the ``swiglu_limit`` that HY V4 is published with, for which vLLM has no name."""
SILU_LIMIT = 10.0
SWIGLU_LIMITS = dict.fromkeys(("swigluoai", "swigluoai_uninterleave"), (None, 7.0)) | {LIMITED_SILU: (SILU_LIMIT,)}
"""Values of ``swiglu_limit`` that plain torch supports, by activation; None alone for others."""

DIVIDING_LAYERS = {"DeepseekV2DecoderLayer", "AXK1DecoderLayer", "OpenPanguDecoderLayer"}
"""Decoder layers that divide all that they add to the residual, in float16, as vLLM divides their shared experts."""

ChooseAndRun = Callable[["ExpertsView", torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes a layer, hidden states [T, hidden], the router's logits [T, experts], and token ids [T] where a table has each
token's experts; returns the sum of routed experts."""


class ExpertsView:
    """View of one layer: every attribute of vLLM's by its name, from the module that has it."""

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

    def set_activation(self, name: str) -> None:
        """Changes the activation, which the layer has as a name or as an enumeration of names."""
        self.weights.activation = type(self.weights.activation)(name)

    @property
    def expert_map(self) -> torch.Tensor | None:
        """[experts] int32 index of each expert among those of this rank, -1 for another rank's; None if the rank has
        all (no expert parallelism)."""
        found: torch.Tensor | None = self.weights.expert_map
        return found

    @property
    def is_sequence_parallel(self) -> bool:
        return (self.module if IS_ONE_MODULE else self.moe_config).is_sequence_parallel

    @property
    def asks_for_more(self) -> str | None:
        """A setting of the weights' module that plain torch does not support; None if there is none."""
        limit = getattr(self.weights, "swiglu_limit", None)
        is_clamped = self.activation.startswith("swigluoai")
        table = getattr(getattr(self.module, "router", None), "_hash_indices_table", None)
        alpha, beta = (
            getattr(self.weights, f"swiglu_{name}", None) if is_clamped else None for name in ("alpha", "beta")
        )
        wanted = {
            f"swiglu_limit={limit}": limit not in SWIGLU_LIMITS.get(self.activation, (None,)),
            f"swiglu_alpha={alpha}": alpha not in (None, 1.702),
            f"swiglu_beta={beta}": beta not in (None, 1.0),
            "hash routing": table is not None and self.experts_of_tokens is None,
        }
        return next((what for what, is_wanted in wanted.items() if is_wanted), None)

    @property
    def first_zero_expert(self) -> int | None:
        """Least id of the experts that return their input; None if the layer has none."""
        is_zero = ZeroExpertRouter is not None and isinstance(self.router, ZeroExpertRouter)
        return self.router.num_logical_experts if is_zero else None

    def add_after_reduction(self, states: torch.Tensor) -> None:
        """Has the layer add what experts without weights make, which every rank has whole."""
        self.router._zero_expert_output = states

    @property
    def experts_of_tokens(self) -> torch.Tensor | None:
        """[vocabulary, top-k] experts of each token id; None where the router's logits choose."""
        table: torch.Tensor | None = getattr(getattr(self.module, "gate", None), "tid2eid", None)
        return table

    @property
    def has_own_forward(self) -> bool:
        """Whether the layer's class, derived by a model, has another ``forward`` than vLLM's."""
        usual = (fused_moe.FusedMoE, fused_moe.SharedFusedMoE) if IS_ONE_MODULE else (ExpertsLayer,)
        return type(self.module).forward not in [each.forward for each in usual]

    def use(self, method: Any, choose_and_run: ChooseAndRun) -> None:
        """Makes the layer run ``choose_and_run``, on weights in the layout of ``method``."""
        if IS_ONE_MODULE:
            self.module.quant_method = method
            # vLLM's own dispatch by platform sets this. Some models pass the arguments by name, others do not.
            self.module._forward_method = partial(self._whole, choose_and_run)
        else:
            self.weights.quant_method = method
            self.module._forward_entry = partial(self._inner, choose_and_run)
        method.process_weights_after_loading(self.weights)

    def _whole(
        self, choose_and_run: ChooseAndRun, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``FusedMoE.forward`` returns: the experts' sum, after the shared experts' output if any."""
        layer = self.module
        shared = None if layer.shared_experts is None else layer.shared_experts(hidden_states)
        out = choose_and_run(self, layer.apply_routed_input_transform(hidden_states), router_logits, None)
        return self._reduced(out) if shared is None else (self._reduced(shared), self._reduced(out))

    def _reduced(self, states: torch.Tensor) -> torch.Tensor:
        layer = self.module
        is_cut = layer.tp_size > 1 or layer.ep_size > 1
        return tensor_model_parallel_all_reduce(states) if layer.reduce_results and is_cut else states

    def _inner(
        self,
        choose_and_run: ChooseAndRun,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        shared_input: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
        *_: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Replaces the inner call of ``MoERunner.forward``, which itself transforms inputs, and reduces outputs."""
        shared = self.module.shared_experts
        shared_out = None if shared is None else shared._layer(shared_input)
        out = choose_and_run(self, hidden, logits, token_ids)
        return out if shared_out is None else (shared_out, out)


def activation_name(weights: Any) -> str:
    """Name that checkpoints have for the activation of ``weights``, the module that has the weights; ``LIMITED_SILU``
    for one that they have no name for."""
    name: str = getattr(weights.activation, "value", weights.activation)
    is_limited = name == "silu" and getattr(weights, "swiglu_limit", None) == SILU_LIMIT
    return LIMITED_SILU if is_limited else name


def experts_layers(model: nn.Module) -> Iterator[tuple[str, ExpertsView]]:
    """Yields the mixture-of-experts layers of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLayer):
            yield name, ExpertsView(module)


def wrong_in_float16(model: nn.Module) -> str | None:
    """Name of a layer whose shared experts are added with a wrong weight in float16; None if there is none.

    Lest sums overflow, vLLM then divides shared experts by ``routed_scaling_factor`` in place of multiplying routed
    ones. That is right only if the decoder layer divides all else, too.
    """
    if any(base.__name__ in DIVIDING_LAYERS for module in model.modules() for base in type(module).__mro__):
        return None
    for name, module in model.named_modules():
        divides = type(module).__name__ == "NemotronHMoE" if IS_ONE_MODULE else isinstance(module, ExpertsLayer)
        if divides and module.routed_scaling_factor != 1.0 and module.shared_experts is not None:
            return name
    return None
