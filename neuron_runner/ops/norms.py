"""RMSNorm, with and without a residual."""

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from neuron_runner.ops.sdk import fused_rms_norm, has_fused_rms_norm


class NeuronRMSNorm(RMSNorm):
    """The SDK's AwsNeuronRmsNorm, in float32; without it vLLM's formula, which XLA fuses as well."""

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        is_plain = self.has_weight and self.variance_size_override is None
        is_fused = is_plain and x.device.type == "xla" and has_fused_rms_norm()
        if not is_fused:
            return self.forward_native(x, residual)
        total = x.float() if residual is None else x.float() + residual
        out = fused_rms_norm(total, self.weight.data, self.variance_epsilon).to(x.dtype)
        return out if residual is None else (out, total.to(x.dtype))
