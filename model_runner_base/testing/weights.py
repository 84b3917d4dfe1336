"""Checkpoints with other weights of the same shapes, and broken ones, for engines that load weights while they run."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.models import TinyModel


def other_weights(model: TinyModel, directory: Path) -> TinyModel:
    """A checkpoint of the same shapes with every weight drawn anew, but for those that are zero, since vLLM may leave
    them out."""
    weights = load_file(model.path / "model.safetensors")
    torch.manual_seed(99)
    for tensor in filter(torch.any, weights.values()):
        torch.nn.init.normal_(tensor, std=0.25 if tensor.ndim > 1 else 0.1)
    return _written(model, weights, directory)


def broken_weights(model: TinyModel, directory: Path) -> Iterator[tuple[TinyModel, str]]:
    """Yields copies of a checkpoint, each with the first words of the error that it is refused with: one lacks a matrix
    of the last layer, in the other that matrix lacks a row."""
    weights = load_file(model.path / "model.safetensors")
    name = max(name for name, tensor in weights.items() if tensor.ndim > 1 and "layers." in name)
    rest = {each: tensor for each, tensor in weights.items() if each != name}
    yield _written(model, rest, directory / "missing"), f"{name} is missing"
    cut = rest | {name: weights[name][1:].clone()}
    yield _written(model, cut, directory / "cut"), f"{name} has shape {list(cut[name].shape)}"


def _written(model: TinyModel, weights: dict[str, torch.Tensor], directory: Path) -> TinyModel:
    directory.mkdir(parents=True)
    for file in model.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(directory)
