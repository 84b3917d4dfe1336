"""Fused operators of the Neuron SDK, where it is installed. Not run on Neuron hardware.

They are HLO custom calls that Neuron's compiler knows (AwsNeuronRmsNorm, AwsNeuronSilu, AwsNeuronGelu,
AwsNeuronGeluApprxTanh), so they take tensors of an XLA device and nothing else. The norm is a function of
``torch_neuronx.xla_impl.ops``; the activations come by importing ``torch_neuronx``, which puts its own functions in
place of ``torch.nn.functional``'s. Each is wrapped in an operator of torch's: Dynamo cannot look into them.
"""

from importlib import import_module
from typing import Any

import torch
from torch.nn import functional


def sdk_rms_norm() -> Any:
    """The SDK's autograd function, or None. Only an import tells: the public index has placeholders that raise."""
    try:
        operator = getattr(import_module("torch_neuronx.xla_impl.ops"), "RmsNorm", None)
    except Exception:
        return None
    return operator if hasattr(operator, "apply") else None


@torch.compiler.assume_constant_result
def has_fused_rms_norm() -> bool:
    """Whether ``fused_rms_norm`` runs here, on XLA tensors."""
    return sdk_rms_norm() is not None


@torch.library.custom_op("neuron_runner::fused_rms_norm", mutates_args=())
def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of ``x`` [..., hidden] float32 over its last dimension, times ``weight`` [hidden]."""
    return sdk_rms_norm().apply(x, weight, eps, x.dim() - 1)


@fused_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.compiler.assume_constant_result
def has_fused_activation(name: str) -> bool:
    """Whether the SDK has put a function of its own, for XLA tensors, in place of ``torch.nn.functional.<name>``."""
    home = getattr(functional, name).__module__ or ""
    return home.partition(".")[0] == "torch_neuronx"


@torch.library.custom_op("neuron_runner::fused_activation", mutates_args=())
def fused_activation(x: torch.Tensor, name: str, approximate: str) -> torch.Tensor:
    """``name`` is "silu" or "gelu", ``approximate`` GELU's "none" (erf) or "tanh"; shaped and typed like ``x``."""
    if name == "gelu":
        return functional.gelu(x, approximate=approximate)
    return functional.silu(x)


@fused_activation.register_fake
def _(x: torch.Tensor, name: str, approximate: str) -> torch.Tensor:
    return torch.empty_like(x)
