"""Gated activations: the SDK's AwsNeuronSilu and AwsNeuronGelu where it has them.

Without it, vLLM's formulas in float32, rounded once; vLLM rounds the activation before the product.
"""

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from neuron_runner.ops.sdk import fused_activation, has_fused_activation


class NeuronSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if x.device.type == "xla" and has_fused_activation("silu"):
            return fused_activation(gate, "silu", "none") * up
        return (F.silu(gate.float()) * up).to(x.dtype)


class NeuronGeluAndMul(GeluAndMul):
    """GELU, exact by erf (``approximate`` "none") or approximated by tanh, of the first half times the second."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if x.device.type == "xla" and has_fused_activation("gelu"):
            return fused_activation(gate, "gelu", self.approximate) * up
        return (F.gelu(gate.float(), approximate=self.approximate) * up).to(x.dtype)
