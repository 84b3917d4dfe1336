"""Loading a checkpoint by vLLM's own loaders, with one clear line where it does not fit."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model


class CheckpointError(ValueError):
    """The checkpoint cannot be loaded into the model that its config describes."""


def load_checkpoint(vllm_config: VllmConfig) -> nn.Module:
    """The model with its weights, on the device of ``load_config``; raises CheckpointError naming the first misfit."""
    try:
        return get_model(vllm_config=vllm_config)
    except NotImplementedError:
        raise  # A layer said what it does not support: no fault of the checkpoint.
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        model_config = vllm_config.model_config
        reason = _misfit(model_config) or str(error).partition("\n")[0]
        raise CheckpointError(
            f"cannot load checkpoint {model_config.model}: {reason}; save the checkpoint again, or correct config.json"
        ) from None


def _misfit(model_config: ModelConfig) -> str | None:
    """The first tensor that is missing or of another shape than the config asks for, by transformers' own model."""
    files = sorted(Path(model_config.model).glob("*.safetensors"))
    try:
        with torch.device("meta"):
            wanted = AutoModelForCausalLM.from_config(model_config.hf_config).state_dict()
        found = {}
        for path in files:
            with safe_open(path, "pt") as tensors:
                found.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
    except Exception:
        return None  # Not a model of transformers, or unreadable: the loader's own words must do.
    if not any(name in found for name in wanted):
        return None  # Saved under other names, as bare models without a head are.
    tied = "lm_head.weight" if model_config.hf_config.tie_word_embeddings else None
    for name, tensor in wanted.items():
        if name in found and found[name] != list(tensor.shape):
            return f"{name} has shape {found[name]}, the config asks for {list(tensor.shape)}"
        if name not in found and name != tied:
            return f"{name} is missing"
    return None
