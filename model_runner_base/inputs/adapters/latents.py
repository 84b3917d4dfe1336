"""Adapters of the projection that latent attention absorbs (models/layers/latent_attention.py).

``kv_b_proj`` is never run on a token's latent, so what an adapter adds to its weights is absorbed as they are. For a
query q of one head, and A and B of the token's slot:

    q . ((W_K + B_K A) latent) = (W_K^T q + A^T (B_K^T q)) . latent

Latents do not depend on these adapters, nor does the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from model_runner_base.inputs.adapters.slots import SlottedLayer
from model_runner_base.models.layers.latent_attention import AbsorbedProjection


class AdaptedProjection:
    """Projects as ``plain`` does, and adds what the tokens' own adapters of ``layer`` make, from all slots at once.

    S: slots; r: their rank; the other letters as in models/layers/latent_attention.py.
    """

    def __init__(self, plain: Any, layer: Any) -> None:
        self._plain, self._layer = plain, layer
        method: AbsorbedProjection = layer.base_layer.quant_method
        self._num_heads, self._sizes = method.num_heads, method.sizes

    def to_latents(self, queries: torch.Tensor) -> torch.Tensor:
        a, b, _ = self._matrices()
        own = self._layer.punica_wrapper.own_slots(torch.einsum("thp,srhp->thsr", queries.to(b.dtype), b))
        return self._plain.to_latents(queries) + (own.flatten(2) @ a.flatten(1).t()).to(queries.dtype)

    def from_latents(self, outputs: torch.Tensor) -> torch.Tensor:
        a, _, b = self._matrices()
        own = self._layer.punica_wrapper.own_slots((outputs.to(a.dtype) @ a.flatten(1)).unflatten(-1, a.shape[1:]))
        return self._plain.from_latents(outputs) + torch.einsum("thsr,srhv->thv", own, b).to(outputs.dtype)

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A [L, S, r], and B's parts of keys [S, r, H, P] and of values [S, r, H, V]."""
        (a,), (b,) = self._layer.lora_a_stacked, self._layer.lora_b_stacked
        return (a, *b.view(*b.shape[:2], self._num_heads, sum(self._sizes)).split(self._sizes, dim=3))


class AbsorbedLayer(SlottedLayer):
    """A LoRA layer of an absorbed projection, whose products are made for each head."""

    def products_memory(self, num_tokens: int, num_logits: int) -> int:
        """Bytes of each head's products with B or A of all slots, masked, of what they add to latents or values, and of
        copies that ``einsum`` makes."""
        method: AbsorbedProjection = self.layer.base_layer.quant_method
        (a,) = self._on_device["lora_a_stacked"]
        widest = max(a.shape[0], *method.sizes)
        return num_tokens * method.num_heads * 4 * (a[0].numel() + widest) * torch.float32.itemsize


def is_absorbed(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "quant_method", None), AbsorbedProjection)


def slotted_class(layer: BaseLayerWithLoRA) -> type[SlottedLayer]:
    return AbsorbedLayer if is_absorbed(layer.base_layer) else SlottedLayer  # type: ignore[attr-defined,arg-type]


@contextmanager
def with_weights(model: nn.Module) -> Iterator[None]:
    """Context in which absorbed projections have a ``weight``, whose device vLLM reads when it makes LoRA layers."""
    layers: list[Any] = [layer for layer in model.modules() if is_absorbed(layer)]
    for layer in layers:
        layer.weight = nn.Parameter(layer.to_latent.data[0], requires_grad=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.weight


def adapt_projections(model: nn.Module) -> None:
    """Makes each layer of latent attention add the adapters of its projection, once that is a LoRA layer."""
    for module in model.modules():
        if isinstance(module, MLAAttention) and isinstance(module.kv_b_proj, BaseLayerWithLoRA):
            attention: Any = module
            attention.projection = AdaptedProjection(attention.projection, attention.kv_b_proj)
