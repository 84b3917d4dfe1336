"""Activations of experts of transformers, for the layers that vLLM's Transformers backend puts in their place.

What a class computes between its products is code, and no field of a config names it. So it is tried on numbers.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.layers.fused_moe import ACTIVATIONS
from model_runner_base.vllm_compat.probes.experts import LIMITED_SILU, ExpertsView

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Function of the first products' numbers, gate and up [..., 2 * inner], to [..., inner]."""

GATED = {name: compute for name, compute in ACTIVATIONS.items() if not name.endswith(("_no_mul", LIMITED_SILU))}
"""Activations with a gate that vLLM has a name for."""
PRODUCTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's products that vLLM loads."""
SPREAD = 6.0
"""Standard deviation of the numbers that are tried: many exceed the limits of 7 and 10 at which models clamp."""
LARGE = (-1000.0, -200.0, -50.0, 50.0, 200.0, 1000.0)
"""Numbers that are tried with each other, for models that clamp at larger ones."""


def follow_activation(layer: ExpertsView, replaced: nn.Module) -> None:
    """Gives a layer the activation of the experts in whose place it is."""
    layer.set_activation(activation_of(replaced))


def check_activation(layer: ExpertsView, replaced: nn.Module) -> None:
    """Raises UnsupportedConfigError for a layer that computes another activation than the experts before it."""
    if (name := activation_of(replaced)) != layer.activation:
        raise UnsupportedConfigError(
            f"experts of {type(replaced).__name__} compute {name}, and vLLM's Transformers backend {layer.activation}: "
            "use a model that vLLM has a class of its own for"
        )


def activation_of(experts: nn.Module) -> str:
    """Name in ``ACTIVATIONS``; raises UnsupportedConfigError for experts that compute something else."""
    if (activation := _activation(experts)) is not None:
        numbers = torch.Generator("cpu").manual_seed(0)
        inner = SPREAD * torch.randn(64, 64, generator=numbers, device="cpu", dtype=torch.float32)
        large = torch.tensor(LARGE, device="cpu", dtype=torch.float32)
        inner[0] = torch.cat((large.repeat_interleave(len(LARGE))[:32], large.repeat(len(LARGE))[:32]))
        try:
            got = activation(inner)
        except Exception:  # Code of any model, which may want more than these numbers.
            got = inner
        for name, compute in GATED.items():
            wanted = compute(inner)
            if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
                return name
    raise UnsupportedConfigError(
        f"experts of {type(experts).__name__} are not supported by vLLM's Transformers backend, which computes other "
        f"ones (gated by {', '.join(GATED)}): use a model that vLLM has a class of its own for"
    )


def _activation(experts: nn.Module) -> Activation | None:
    """Function that experts compute between their products; None if that is not all that they compute."""
    if hasattr(experts, "_apply_gate"):  # Experts in one tensor, of which transformers says what they have beside.
        apply: Any = experts._apply_gate
        has_more = not getattr(experts, "has_gate", True) or getattr(experts, "has_post_expert_norm", False)
        return None if has_more else apply
    if not isinstance(experts, nn.ModuleList):
        return None
    expert = copy(experts[0])
    for gate, up, down in PRODUCTS:
        others = {name: part for name, part in expert._modules.items() if name not in (gate, up, down)}
        has_more = any(part is not None and next(part.parameters(), None) is not None for part in others.values())
        if len(others) == len(expert._modules) - 3 and not has_more:
            expert._modules = {**others, gate: _Half(0), up: _Half(1), down: nn.Identity()}
            return expert
    return None


class _Half(nn.Module):
    """Product whose result is known: the first or second half of what it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        return inner.chunk(2, dim=-1)[self.index]
