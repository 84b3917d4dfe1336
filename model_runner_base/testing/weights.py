"""Checkpoints with other weights of the same shapes, for engines that load weights while they run."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.models import TinyModel


def other_weights(model: TinyModel, directory: Path) -> TinyModel:
    """A checkpoint of the same shapes with every weight drawn anew."""
    weights = load_file(model.path / "model.safetensors")
    torch.manual_seed(99)
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.25 if tensor.ndim > 1 else 0.1)
    directory.mkdir()
    for file in model.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(directory)
