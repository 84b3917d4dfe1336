"""Scales of an 8-bit KV cache: a checkpoint's numbers that keys and values are divided by before they are rounded.

Scores are linear in keys, and outputs in values. So queries are multiplied by the scale of keys, and outputs by that of
values, around attention that knows of no scales. A layer without scales in the checkpoint has the scale 1, and pays
nothing. A layer of latents has one scale, that of keys, for whole rows.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import MLAAttention

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.models.layers.attention_blocks import OTHER, TOWER, AttentionBlocks, attention_layers
from model_runner_base.models.weight_places import WeightPlaces
from model_runner_base.models.weight_stream import Weights

logger = init_logger(f"vllm.{__name__}")

_NAME = re.compile(
    r"(?P<path>.+)\.(?P<kind>k|v|kv|q|prob)_scale"
    r"|(?P<old_path>.+)\.(?P<old_kind>[kv])_proj\.output_scale"
    r"|(?P<cache_path>.+)\.(?P<cache_kind>[kv])_cache\.scale"
    r"|(?P<query_path>.+\.self_attn)\.q\.scale"
)
"""Names of scales in checkpoints: of ModelOpt, AutoFP8, compressed-tensors and Hunyuan, and vLLM's own."""
_ZERO_POINT = re.compile(r".+\.[qkv]_zero_point")
_OF_MISTRAL = re.compile(r".+\.(k|v|kv)_fake_quantizer\.qscale_act")
"""Names of scales in Mistral's own files, where attention blocks have other names than in the model."""
_KNOWN_PATHS = "paths_of_attention"
"""Attribute of a loaded model: names of attention layers, by paths of the checkpoint that it was loaded from."""


class CacheScales:
    """Scales in a stream of weights, and the attention layers that they are of.

    A scale is of the attention block that the model loads weights of the same path to. So a file may name its layers
    otherwise than the model does. A path without weights, as of layers that share theirs, is the model's own.
    """

    def __init__(self) -> None:
        self.places = WeightPlaces()
        """Context that the model must be loaded in."""
        self._found: dict[str, dict[str, float]] = {}
        """Scales by path in the checkpoint, and what they scale: keys, values, queries or probabilities."""
        self._names: dict[str, str] = {}
        """Stored name of a scale by its path."""
        self._layers: dict[str, Sequence[str]] = {}
        """Names of the model's layers by paths in the model."""
        self._of_layers: dict[str, dict[str, float]] = {}
        """Scales by the name of their layer."""

    def take(self, model: nn.Module, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights that are no scales, and keeps the scales; raises ValueError for one that is none, and for
        scales that are not applied: with a zero point, or of Mistral's own files."""
        blocks = AttentionBlocks(model)
        self._layers = blocks.layers
        self.places.expect(blocks.labels)
        for name, tensor in weights:
            if _OF_MISTRAL.fullmatch(name):
                raise ValueError(
                    f"{name}: scales of KV caches in Mistral's own files are not applied yet: set kv_cache_dtype=auto"
                )
            if _ZERO_POINT.fullmatch(name):
                if tensor.float().any():
                    raise ValueError(f"{name}: zero points of KV caches are not applied yet: set kv_cache_dtype=auto")
                continue
            match = _NAME.fullmatch(name)
            if match is None:
                self.places.follow(name, tensor)
                yield name, tensor
                continue
            value = float(tensor) if tensor.numel() == 1 else 0.0
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is no scale of a KV cache: it must be one number above 0")
            path = match["path"] or match["old_path"] or match["cache_path"] or match["query_path"]
            kind = match["kind"] or match["old_kind"] or match["cache_kind"] or "q"
            self._names[path] = name
            for each in ("k", "v") if kind == "kv" else (kind,):
                self._found.setdefault(path, {})[each] = value

    def apply(self, model: nn.Module) -> None:
        """Gives the layers of a loaded model their scales; raises ValueError for a scale that is of no layer."""
        self._assign(model)
        for layer in _attention_layers(model):
            if (scales := self._scales_of(layer)) != (1.0, 1.0):
                for name, scale in zip(_BUFFERS, scales, strict=True):
                    layer.register_buffer(name, torch.tensor(scale), persistent=False)
                layer.impl.forward = scaled(layer.impl.forward)

    def renew(self, model: nn.Module, is_whole: bool) -> None:
        """Overwrites the scales of layers after a reload: all, with 1 where there is none, if the reload ``is_whole``;
        else those of layers that it has scales for.

        Raises ValueError for a scale that is of no layer, and for scales of a layer that was loaded without.
        """
        self._assign(model)
        for layer in _attention_layers(model):
            scales = self._scales_of(layer)
            if hasattr(layer, _BUFFERS[0]):
                if is_whole or self._of_layers.get(_owner(layer), {}).keys() & {"k", "v"}:
                    for name, scale in zip(_BUFFERS, scales, strict=True):
                        getattr(layer, name).copy_(torch.tensor(scale))
            elif scales != (1.0, 1.0):
                raise ValueError(
                    f"{layer.layer_name} was loaded without scales of its KV cache, and cannot be given some: start "
                    "another engine, since the weights are replaced already"
                )

    def _assign(self, model: nn.Module) -> None:
        """Finds the layers of all scales; raises ValueError for a scale that is of none."""
        written: dict[str, set[str]] = {}
        for name, labels in self.places.found.items():
            while name := name.rpartition(".")[0]:
                written.setdefault(name, set()).update(labels)
        known = getattr(model, _KNOWN_PATHS, {}) | {
            path: self._layers[label]
            for path, labels in written.items()
            for label in labels
            if len(labels) == 1 and label in self._layers
        }
        setattr(model, _KNOWN_PATHS, known)
        left_out, assigned = [], []
        for path, scales in self._found.items():
            candidates = [path]
            for _ in range(2):  # Names may go on with a projection, or with vLLM's layers of attention.
                candidates.append(candidates[-1].rpartition(".")[0])
            layers = next((each for name in candidates if (each := known.get(name) or self._layers.get(name))), None)
            if layers is not None:
                assigned.append((layers, scales))
            elif any(written.get(name, {OTHER}) <= {TOWER} for name in candidates):
                left_out.append(self._names[path])
            else:
                raise ValueError(_of_no_layer(self._names[path]))
        if left_out and not assigned:
            raise ValueError(_of_no_layer(left_out[0]))
        # A scale of one layer comes after a scale of all layers with the same weights.
        for layers, scales in sorted(assigned, key=lambda pair: -len(pair[0])):
            for layer in layers:
                self._of_layers.setdefault(layer, {}).update(scales)
        if left_out:
            logger.warning(
                "%s and %s other scales of KV caches are left out, as the layers are that they belong to.",
                left_out[0],
                len(left_out) - 1,
            )

    def _scales_of(self, layer: Any) -> tuple[float, float]:
        """Scales of a layer's keys and values; 1 where the checkpoint has none, and for keys of an encoder's outputs,
        which are written as they are."""
        if layer.impl.is_cross:
            return 1.0, 1.0
        found = self._of_layers.get(_owner(layer), {})
        key = found.get("k", 1.0)
        return key, key if isinstance(layer, MLAAttention) else found.get("v", 1.0)


def _of_no_layer(name: str) -> str:
    return (
        f"{name} is a scale of a KV cache, and of no attention layer of the model: leave it out of the checkpoint, or "
        "set kv_cache_dtype=auto"
    )


_BUFFERS = ("cache_key_scale", "cache_value_scale")


def scales_by_layer(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Scales of keys and values that the attention layers of a loaded model have; 1 where the checkpoint has none."""
    return {
        layer.layer_name: tuple(float(getattr(layer, name, 1.0)) for name in _BUFFERS)
        for layer in _attention_layers(model)
    }


def has_small_cache(vllm_config: VllmConfig) -> bool:
    """Whether the KV cache has 8 bits a number."""
    return vllm_config.cache_config.cache_dtype.startswith("fp8")


def has_plain_attention(model: nn.Module) -> bool:
    """Whether attention is the base's own; vLLM's kernels read the scales that vLLM loads."""
    return any(True for _ in _attention_layers(model))


def _attention_layers(model: nn.Module) -> Iterator[Any]:
    layers = {layer.layer_name: layer for _, layer in attention_layers(model)}
    for layer in layers.values():
        if isinstance(layer.impl, PagedAttentionImpl):
            yield layer


def _owner(layer: Any) -> str:
    """Name of the layer whose cache a layer reads: its own, or that of another."""
    return getattr(layer, "kv_sharing_target_layer_name", None) or layer.layer_name


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
