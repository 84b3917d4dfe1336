"""Layout of the KV cache in this library's own types: layers, groups that share blocks, tensors.

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
    """Form of the keys and values that one attention layer keeps of a token."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    spec: Any
    """vLLM's KV-cache spec of the layer, with which its metadata builders are made."""


@dataclass(frozen=True)
class GroupLayout:
    """Layers that keep a token's keys and values in blocks of the same ids."""

    layers: dict[str, LayerCache]
    """Layers by name."""
    block_size: int
    """Number of tokens in one of the scheduler's blocks."""


@dataclass(frozen=True)
class TensorLayout:
    """Memory that layers share. They are in different groups, so no two of them use a block at a time."""

    num_blocks: int
    """Number of the scheduler's blocks in this memory."""
    layer_names: list[str]


@dataclass(frozen=True)
class CacheLayout:
    """Layout of a model's whole KV cache."""

    num_blocks: int
    """Number of the scheduler's blocks in each group; block 0 is the null block, which no request gets."""
    groups: list[GroupLayout]
    tensors: list[TensorLayout]
    make_views: Callable[..., dict[str, torch.Tensor]] | None = None
    """Function that makes the one buffer of all layers, and each layer's view of it for vLLM's own kernels; None if
    vLLM does not place all layers in one buffer."""
