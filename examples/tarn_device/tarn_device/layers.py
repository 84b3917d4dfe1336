"""Kernels for layers of vLLM: RMSNorm, and each class that turns as RotaryEmbedding does. Here they are plain torch."""

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


@RMSNorm.register_oot
class TarnRMSNorm(RMSNorm):
    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if not self.has_weight or self.variance_size_override is not None:
            return self.forward_native(x, residual)  # of few models
        total = x.float() if residual is None else x.float() + residual.float()
        scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        out = (total * scale).to(x.dtype) * self.weight
        return out if residual is None else (out, total.to(x.dtype))


class TarnRotary:
    """Turns the first ``rotary_dim`` numbers of each head. A pair is two halves' numbers, or two neighbours."""

    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        cos, sin = self.cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
        return self.turn(query, cos, sin), None if key is None else self.turn(key, cos, sin)

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(cos), -1, self.head_size)  # from [T, heads * size], or from [T, heads, size]
        shape, dim = ((2, -1), -2) if self.is_neox_style else ((-1, 2), -1)
        one, other = heads[..., : self.rotary_dim].float().unflatten(-1, shape).unbind(dim)
        turned = torch.stack((one * cos - other * sin, other * cos + one * sin), dim=dim).flatten(-2)
        return torch.cat((turned.to(x.dtype), heads[..., self.rotary_dim :]), dim=-1).view(x.shape)


classes = [RotaryEmbedding]
for cls in classes:
    classes += cls.__subclasses__()
    # vLLM looks for a class by its name, so each has an override. Those that turn otherwise keep their own forward.
    if cls.forward_native is RotaryEmbedding.forward_native:
        cls.register_oot(type(f"Tarn{cls.__name__}", (TarnRotary, cls), {}))
