"""vLLM's layers of latent attention in plain torch: their forwards are replaced on the instances, after loading.

The projection that would make keys and values of latents, ``kv_b_proj``, is kept in the form in which it is absorbed
(attention/latent.py). It stays a weight of its layer: it moves to a device, and is renewed by a reload, as any other.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from model_runner_base.errors import UnsupportedConfigError

MADE_BY_VLLM = ("W_UK_T", "W_UV")
"""vLLM's own forms of the projection, which are no weights of a layer."""


class AbsorbedProjection(UnquantizedLinearMethod):
    """Keeps the weight [H * (P + V), L] of ``kv_b_proj`` as two, also when it is loaded again.

    P: numbers of a head's key without its rotary part; V: of its value; L: of a latent. ``to_latent`` [H, P, L] takes
    queries to the latents' space, and ``from_latent`` [H, L, V] brings outputs back.
    """

    def __init__(self, num_heads: int, key_size: int, value_size: int) -> None:
        self.num_heads, self.sizes = num_heads, (key_size, value_size)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data.view(self.num_heads, sum(self.sizes), -1)
        keys, values = weight.split(self.sizes, dim=1)
        layer.to_latent = nn.Parameter(keys.contiguous(), requires_grad=False)
        layer.from_latent = nn.Parameter(values.transpose(1, 2).contiguous(), requires_grad=False)
        del layer.weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("keys and values are not made of latents: the projection is absorbed")


class Projection:
    """Projects queries to the latents' space, and outputs back, by the absorbed weights of ``kv_b_proj``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def to_latents(self, queries: torch.Tensor) -> torch.Tensor:
        """[T, H, L] of queries without their rotary part, [T, H, P]."""
        return torch.bmm(queries.transpose(0, 1), self._layer.to_latent).transpose(0, 1)

    def from_latents(self, outputs: torch.Tensor) -> torch.Tensor:
        """[T, H, V] of outputs in the latents' space, [T, H, L]."""
        return torch.bmm(outputs.transpose(0, 1), self._layer.from_latent).transpose(0, 1)


def use_plain_latents(model: nn.Module) -> None:
    """Makes every layer of latent attention of a loaded model run in plain torch.

    Raises UnsupportedConfigError for a layer whose results would be wrong.
    """
    for name, module in model.named_modules():
        if isinstance(module, MLAAttention):
            layer: Any = module
            _check(name, layer)
            method = AbsorbedProjection(layer.num_heads, layer.qk_nope_head_dim, layer.v_head_dim)
            layer.kv_b_proj.quant_method = method
            method.process_weights_after_loading(layer.kv_b_proj)
            for made in MADE_BY_VLLM:
                if hasattr(layer, made):
                    delattr(layer, made)
            layer.projection = Projection(layer.kv_b_proj)
            layer.forward = MethodType(forward, layer)
            layer.process_weights_after_loading = _keep_weights


def _check(name: str, layer: Any) -> None:
    projection = layer.kv_b_proj
    if type(projection.quant_method) is not UnquantizedLinearMethod or projection.bias is not None:
        kind = type(projection.quant_method).__name__
        raise UnsupportedConfigError(
            f"{name}: a projection of latents that is quantised ({kind}) or has a bias is not supported in plain torch:"
            " use the checkpoint that a quantised one was made from"
        )


def _keep_weights(dtype: torch.dtype) -> None:
    """Does nothing, where vLLM would make its own forms of the projection after a reload."""


def forward(
    self: Any, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """[T, H * V] for queries ``q`` [T, H, P + R], latents ``kv_c_normed`` [T, L] and rotary keys ``k_pe`` [T, 1, R]."""
    metadata: Any = get_forward_context().attn_metadata
    cache = self.kv_cache[0] if isinstance(self.kv_cache, list) else self.kv_cache
    nope, rotary = q.view(-1, self.num_heads, self.qk_head_dim).split(
        (self.qk_nope_head_dim, self.qk_rope_head_dim), dim=2
    )
    query = torch.cat((self.projection.to_latents(nope), rotary), dim=2).flatten(1)
    step = None if metadata is None else metadata[self.layer_name]
    out = self.impl.forward(self, query, k_pe.flatten(1), kv_c_normed, cache, step)
    return self.projection.from_latents(out.view(-1, self.num_heads, self.kv_lora_rank)).flatten(1)
