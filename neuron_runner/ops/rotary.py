"""Rotary embedding, both styles, of all of a head's dimensions or the first ``rotary_dim``."""

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class NeuronRotaryEmbedding(RotaryEmbedding):
    """Rotates in float32 and rounds once, where vLLM rounds each product in the model's dtype. Nothing in place."""

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``positions`` [T]; ``query`` and ``key`` [T, heads * head_size] or [T, heads, head_size]."""
        rows = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        cos, sin = rows.float().unsqueeze(1).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(cos.shape[0], -1, self.head_size)
        turning = heads[..., : self.rotary_dim].float()
        if self.is_neox_style:
            first, second = turning.chunk(2, dim=-1)
        else:
            first, second = turning[..., ::2], turning[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        both = torch.cat(turned, dim=-1) if self.is_neox_style else torch.stack(turned, dim=-1).flatten(-2)
        return torch.cat((both.to(x.dtype), heads[..., self.rotary_dim :]), dim=-1).reshape(x.shape)
