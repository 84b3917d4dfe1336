"""First misfit of a checkpoint on disk, found by its headers before a weight is read."""

import math
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.checkpoint_record import record_of
from model_runner_base.models.quantized.configuration import format_of_model, gguf_weights
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import plain_shapes

Shapes = Mapping[str, list[int]]


def misfit_of_reload(model_config: ModelConfig, model: nn.Module) -> str | None:
    """Describes the first tensor that a loaded model took from its own checkpoint, and that the one of
    ``model_config`` lacks or has in another shape; None if all fit.

    A GGUF file is compared with the config. Nothing is known of a checkpoint that is no local directory, of files other
    than safetensors, and of a model that has no record.
    """
    try:
        if gguf_weights(model_config):
            return None
        found = _stored_shapes(model_config)
    except (CheckpointError, UnsupportedConfigError) as error:
        return str(error)
    record = record_of(model)
    if record is None or not found:
        return None
    # Some models read a part of their weights from a checkpoint of its own.
    elsewhere = tuple(source.prefix for source in getattr(model, "secondary_weights", ()))
    wanted = {name: shape for name, shape in record.shapes.items() if not name.startswith(elsewhere)}
    return _first_misfit(wanted, found, record.names, _tied(model_config))


def misfit_of_config(model_config: ModelConfig) -> str | None:
    """Describes the first tensor of transformers' model of a config that its checkpoint lacks or has in another shape;
    None if all fit, or if nothing can be said.

    vLLM's model may know other names, so this explains an error of the loader, and is none by itself.
    """
    if model_config.runner_type == "pooling" or model_config.is_multimodal_model:
        return None  # Its tensors are not those of a model that generates, or that sees nothing.
    try:
        if gguf_weights(model_config):
            return None  # It was compared with the config.
        found = _stored_shapes(model_config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config.hf_config)
    except (CheckpointError, UnsupportedConfigError) as error:
        return str(error)
    except Exception:
        return None  # Not a model of transformers.
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if not any(name in found for name in wanted):
        return None  # Saved under other names, as bare models without a head are.
    if model_config.quantization:
        # vLLM's method packs the weights of a module into bytes, or into tensors with names of their own.
        entries = StoredTensors(Path(model_config.model)).entries
        packed = {_module(name) for name, entry in entries.items() if entry.dtype == torch.uint8 or name not in wanted}
        wanted = {name: shape for name, shape in wanted.items() if _module(name) not in packed}
    return _first_misfit(wanted, found, wanted, _tied(model_config))


def _first_misfit(wanted: Shapes, found: Shapes, known: Container[str], tied: str | None) -> str | None:
    """Describes the first tensor of ``wanted`` that ``found`` lacks, unless the tensors of its layer with names that
    are not ``known`` are as large as all that it lacks: releases of transformers write a layer under other names, or
    several tensors as one."""
    absent = {name: shape for name, shape in wanted.items() if name not in found and name != tied}
    lacking = _sizes(absent)
    renamed = _sizes({name: shape for name, shape in found.items() if name not in known})
    for name, shape in wanted.items():
        if name in found and found[name] != shape:
            return f"{name} has shape {found[name]}, and must have {shape}"
        if name in absent and lacking[_layer(name)] > renamed[_layer(name)]:
            return f"{name} is missing, of shape {shape}"
    return None


def _stored_shapes(model_config: ModelConfig) -> Shapes:
    """Shapes of a checkpoint's tensors after dequantisation; none if it is no local directory."""
    form, stored = format_of_model(model_config), StoredTensors(Path(model_config.model))
    return plain_shapes(form, stored) if form else {name: entry.shape for name, entry in stored.entries.items()}


def _tied(model_config: ModelConfig) -> str | None:
    """Name of the tensor that a checkpoint may leave out, since another one is used for it."""
    return "lm_head.weight" if getattr(model_config.hf_config, "tie_word_embeddings", False) else None


def _sizes(shapes: Shapes) -> Counter[str]:
    """Numbers of elements by layer."""
    sizes: Counter[str] = Counter()
    for name, shape in shapes.items():
        sizes[_layer(name)] += math.prod(shape)
    return sizes


def _layer(name: str) -> str:
    """Number of the layer that a tensor is of; nothing for one outside of layers."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def _module(name: str) -> str:
    return name.rpartition(".")[0]
