"""Scales of an 8-bit KV cache: a checkpoint's numbers that keys and values are divided by before they are rounded.

Scores are linear in keys, and outputs in values. So queries are multiplied by the scale of keys, and outputs by that of
values, around attention that knows of no scales. A layer without scales in the checkpoint has the scale 1, and pays
nothing. A layer of latents has one scale, that of keys, for whole rows.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.weight_stream import Weights

logger = init_logger(f"vllm.{__name__}")

_NAME = re.compile(
    r"(?P<path>.+?)(\.attn|\.mla_attn|\.[kv]_proj|\.qkv_proj)?\.(?P<kind>k|v|kv|q|prob)_scale"
    r"|(?P<old_path>.+)\.(?P<old_kind>[kv])_proj\.output_scale"
)
"""Names of scales in checkpoints: of ModelOpt, AutoFP8 and compressed-tensors, and vLLM's own."""
_OF_MISTRAL = re.compile(r".+\.(k|v|kv)_fake_quantizer\.qscale_act")
"""Names of scales in Mistral's own files, where attention blocks have other names than in the model."""


class CacheScales:
    """Scales in a stream of weights, by the path of the attention block that they are of."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, float]] = {}

    def take(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights that are no scales, and keeps the scales; raises ValueError for one that is none, and for
        one of Mistral's own files."""
        for name, tensor in weights:
            if _OF_MISTRAL.fullmatch(name):
                raise ValueError(
                    f"{name}: scales of KV caches in Mistral's own files are not applied yet: set kv_cache_dtype=auto"
                )
            match = _NAME.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            value = float(tensor) if tensor.numel() == 1 else 0.0
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is no scale of a KV cache: it must be one number above 0")
            kind = match["kind"] or match["old_kind"]
            for each in ("k", "v") if kind == "kv" else (kind,):
                self._found.setdefault(match["path"] or match["old_path"], {})[each] = value

    def apply(self, model: nn.Module) -> None:
        """Gives the layers of a loaded model their scales; raises ValueError if no scale is of a layer."""
        unused = dict(self._found)
        for layer in _attention_layers(model):
            unused.pop(_path(layer.layer_name), None)
            if (scales := self._scales_of(layer)) != (1.0, 1.0):
                for name, scale in zip(_BUFFERS, scales, strict=True):
                    layer.register_buffer(name, torch.tensor(scale), persistent=False)
                layer.impl.forward = scaled(layer.impl.forward)
        if unused and len(unused) == len(self._found):
            raise ValueError(
                f"scales of the KV cache have other names than the layers, such as {next(iter(unused))}: set "
                "kv_cache_dtype=auto"
            )
        if unused:
            logger.warning(
                "Scales of %s belong to no attention layer of the model, and are left out.", next(iter(unused))
            )

    def renew(self, model: nn.Module, is_whole: bool) -> None:
        """Overwrites the scales of layers after a reload: all, with 1 where there is none, if the reload ``is_whole``;
        else those of layers that it has scales for.

        Raises ValueError for scales of a layer that was loaded without.
        """
        for layer in _attention_layers(model):
            scales = self._scales_of(layer)
            if hasattr(layer, _BUFFERS[0]):
                if is_whole or self._found.get(_path(_owner(layer)), {}).keys() & {"k", "v"}:
                    for name, scale in zip(_BUFFERS, scales, strict=True):
                        getattr(layer, name).copy_(torch.tensor(scale))
            elif scales != (1.0, 1.0):
                raise ValueError(
                    f"{layer.layer_name} was loaded without scales of its KV cache, and cannot be given some: start "
                    "another engine, since the weights are replaced already"
                )

    def _scales_of(self, layer: Any) -> tuple[float, float]:
        """Scales of a layer's keys and values; 1 where the checkpoint has none, and for keys of an encoder's outputs,
        which are written as they are."""
        if layer.impl.is_cross:
            return 1.0, 1.0
        found = self._found.get(_path(_owner(layer)), {})
        key = found.get("k", 1.0)
        return key, key if isinstance(layer, MLAAttention) else found.get("v", 1.0)


_BUFFERS = ("cache_key_scale", "cache_value_scale")


def has_plain_attention(model: nn.Module) -> bool:
    """Whether attention is the base's own; vLLM's kernels read the scales that vLLM loads."""
    return any(True for _ in _attention_layers(model))


def _attention_layers(model: nn.Module) -> Iterator[Any]:
    for layer in model.modules():
        if isinstance(layer, Attention | MLAAttention) and isinstance(layer.impl, PagedAttentionImpl):
            yield layer


def _owner(layer: Any) -> str:
    """Name of the layer whose cache a layer reads: its own, or that of another."""
    return getattr(layer, "kv_sharing_target_layer_name", None) or layer.layer_name


def _path(name: str) -> str:
    """Path of the attention block that a layer is in."""
    return name.rpartition(".")[0]


def scaled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The ``forward`` of a layer's attention, on a cache of divided keys and values. All is scaled in float32."""

    def run(
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if key is not None and value is not None:
            key, value = key.float() / layer.cache_key_scale, value.float() / layer.cache_value_scale
        out = forward(layer, query.flatten(1).float() * layer.cache_key_scale, key, value, kv_cache, attn_metadata)
        out = (out * layer.cache_value_scale).to(query.dtype)
        return out if output is None else output.copy_(out.view_as(output))

    return run
