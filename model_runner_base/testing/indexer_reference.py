"""Indexers (sparse attention, DSA) for a reference whose class in transformers has none, from published formulas."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


def lacks_indexers(model: nn.Module) -> bool:
    """Whether a model's config has an indexer, and its class has none: it would see all keys, without an error."""
    config: Any = model.config
    has_indexers = any(name.endswith(".indexer") for name, _ in model.named_modules())
    return getattr(config, "index_topk", None) is not None and not has_indexers


def add_indexers(model: Any, path: Path) -> None:
    """Makes every layer of a DeepSeek V3 in transformers, with eager attention, hide the keys that DeepSeek V3.2's
    indexer hides; ``path`` is the checkpoint.

    No keys are kept, so the model must be called with whole texts.
    """
    weights = load_file(path / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}.self_attn.indexer."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        layer.self_attn.register_forward_pre_hook(_Hide(own, model.config), with_kwargs=True)


class _Hide:
    """Hook of an attention layer that adds what its indexer hides to the mask."""

    def __init__(self, weights: dict[str, torch.Tensor], config: Any) -> None:
        self._weights, self._config = weights, config

    def __call__(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, mask = kwargs["hidden_states"], kwargs["attention_mask"]
        count = min(self._config.index_topk, hidden.shape[1])
        scores = self._scores(layer, hidden, kwargs["position_embeddings"]) + mask[:, 0]
        hides = torch.ones_like(scores, dtype=torch.bool).scatter(2, scores.topk(count, dim=2).indices, False)
        lowest = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": mask.masked_fill(hides.unsqueeze(1), lowest)}

    def _scores(self, layer: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, S, S] scores of all keys for each token."""
        heads, width, given = self._config.index_n_heads, self._config.index_head_dim, self._weights
        queries = F.linear(layer.q_a_layernorm(layer.q_a_proj(hidden)), given["wq_b.weight"])
        queries = self._rotated(queries.unflatten(2, (heads, width)), rotary)
        keys = F.layer_norm(
            F.linear(hidden, given["wk.weight"]), (width,), given["k_norm.weight"], given["k_norm.bias"], 1e-6
        )
        keys = self._rotated(keys.unsqueeze(2), rotary).squeeze(2)
        weights = F.linear(hidden, given["weights_proj.weight"]) * (heads * width) ** -0.5
        return torch.einsum("bthk,bth->btk", torch.relu(torch.einsum("bthd,bkd->bthk", queries, keys)), weights)

    def _rotated(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, S, H, D] with the first numbers rotated, by halves."""
        size = self._config.qk_rope_head_dim
        cos, sin = (part.unsqueeze(2) for part in rotary)
        turned, rest = x[..., :size], x[..., size:]
        first, second = turned.chunk(2, dim=3)
        return torch.cat((turned * cos + torch.cat((-second, first), dim=3) * sin, rest), dim=3)
