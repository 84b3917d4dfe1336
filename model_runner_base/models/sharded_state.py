"""Sharded state: weights as a rank holds them, in files that a later start reads faster than a checkpoint."""

from torch import nn
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from model_runner_base.errors import CheckpointError
from model_runner_base.models.draft_loading import draft_of


def save_sharded_state(model: nn.Module, path: str, pattern: str | None, max_size: int | None) -> None:
    """Writes a model's state for ``load_format=sharded_state``; raises CheckpointError if that could not read it."""
    if draft_of(model) is not None:
        raise CheckpointError(
            "a model with a draft model cannot be saved as sharded state: save it from an engine without "
            "speculative_config"
        )
    for name, layer in model.named_modules():
        if changed := _changed_weight(layer):
            raise CheckpointError(
                f"{name}.{changed} has another layout than it was loaded in, so sharded state could not be loaded "
                "again: save the model's checkpoint instead"
            )
    ShardedStateLoader.save_model(model, path, pattern=pattern, max_size=max_size)


def _changed_weight(layer: nn.Module) -> str | None:
    """Name of a layer's tensor that was not there when vLLM made the layer, or had another shape; None if there is
    none."""
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    made = parameters | buffers
    state = layer._parameters | {
        name: buffer for name, buffer in layer._buffers.items() if name not in layer._non_persistent_buffers_set
    }
    for name, tensor in state.items():
        if tensor is not None and name != "bias" and (name not in made or made[name].shape != tensor.shape):
            return name
    for name in parameters.keys() - layer._parameters.keys():
        return name
    return None
