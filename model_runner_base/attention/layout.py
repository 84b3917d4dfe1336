"""What the KV cache looks like, in the house's own words: layers, the groups that share blocks, the tensors.

Example: a model of two layers that see everything and one with a sliding window, blocks of 16 tokens:

    CacheLayout(num_blocks=100, groups=[GroupLayout({"layers.0": ..., "layers.2": ...}, block_size=16),
                                        GroupLayout({"layers.1": ...}, block_size=16)],
                tensors=[TensorLayout(num_blocks=100, layer_names=["layers.0", "layers.1"]),
                         TensorLayout(num_blocks=100, layer_names=["layers.2"])])
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    spec: Any
    """vLLM's own words for it, which its metadata builders are made with."""


@dataclass(frozen=True)
class GroupLayout:
    """Layers whose keys and values of a token lie in blocks of one id."""

    layers: dict[str, LayerCache]
    """By name."""
    block_size: int
    """Tokens in a block of the scheduler's."""


@dataclass(frozen=True)
class TensorLayout:
    """Memory that layers share: they are in different groups, so no block is two layers' at a time."""

    num_blocks: int
    """Of the scheduler's."""
    layer_names: list[str]


@dataclass(frozen=True)
class CacheLayout:
    """All of a model's KV cache."""

    num_blocks: int
    """Of the scheduler's, in each group; block 0 is the null block, which no request gets."""
    groups: list[GroupLayout]
    tensors: list[TensorLayout]
    make_views: Callable[..., dict[str, torch.Tensor]] | None = None
    """Where vLLM places all layers in one buffer: makes it, and each layer's cache as vLLM's own kernels want it."""
