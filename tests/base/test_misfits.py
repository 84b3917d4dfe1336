"""Misfits of a checkpoint that a running model is to load are found by its headers; a right one is never refused."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model_runner_base.models.checkpoint_record import ATTRIBUTE, CheckpointRecord
from model_runner_base.models.misfits import misfit_of_reload

SHAPES = {
    "model.embed.weight": [8, 4],
    "model.layers.0.gate.weight": [6, 4],
    "model.layers.0.up.weight": [6, 4],
    "model.layers.0.norm.weight": [4],
    "mtp.layers.0.up.weight": [6, 4],
    "lm_head.weight": [8, 4],
}


class Model(nn.Module):
    """A model that passes over layers for drafts, as vLLM's do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if tensor.dim() and not name.startswith("mtp."):
                torch.empty(tensor.shape).copy_(tensor)


@pytest.fixture(scope="module")
def model() -> Model:
    """A model that was loaded from a checkpoint with all tensors."""
    loaded, record = Model(), CheckpointRecord()
    weights = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    record.watching(loaded.load_weights)(record.offer(record.read(weights)))
    setattr(loaded, ATTRIBUTE, record)
    return loaded


def misfit(model: Model, directory: Path, shapes: dict[str, list[int]], is_tied: bool = False) -> str | None:
    """The words about a checkpoint with tensors of these shapes, in two shards."""
    names = sorted(shapes)
    files = {name: f"model-{1 + index % 2}-of-2.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: torch.zeros(shapes[name]) for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config: Any = SimpleNamespace(model=str(directory), hf_config=SimpleNamespace(tie_word_embeddings=is_tied))
    return misfit_of_reload(config, model)


def without(*names: str, **others: list[int]) -> dict[str, list[int]]:
    return {name: shape for name, shape in SHAPES.items() if name not in names} | others


FUSED = without("model.layers.0.gate.weight", "model.layers.0.up.weight") | {"model.layers.0.gate_up": [12, 4]}


@pytest.mark.parametrize(
    ("shapes", "is_tied"),
    [
        (SHAPES, False),
        (without("mtp.layers.0.up.weight"), False),
        (without("lm_head.weight"), True),
        (SHAPES | {"model.layers.0.rotary.inv_freq": [2], "model.layers.1.up.weight": [6, 4]}, False),
        (FUSED, False),
        ({name.removeprefix("model."): shape for name, shape in SHAPES.items()}, False),
    ],
    ids=["the same", "without drafts", "tied", "more", "fused", "other prefix"],
)
def test_what_fits(shapes: dict[str, list[int]], is_tied: bool, model: Model, tmp_path: Path) -> None:
    assert misfit(model, tmp_path, shapes, is_tied) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (without("model.layers.0.up.weight"), "model.layers.0.up.weight is missing, of shape [6, 4]"),
        (without("lm_head.weight"), "lm_head.weight is missing, of shape [8, 4]"),
        (
            without("model.layers.0.up.weight") | {"model.layers.0.rotary.inv_freq": [2]},
            "model.layers.0.up.weight is missing, of shape [6, 4]",
        ),
        (
            SHAPES | {"model.layers.0.norm.weight": [5]},
            "model.layers.0.norm.weight has shape [5], and must have [4]",
        ),
        (FUSED | {"model.layers.0.gate_up": [6, 4]}, "model.layers.0.gate.weight is missing, of shape [6, 4]"),
    ],
    ids=["missing", "head", "a number of another kind", "shape", "half"],
)
def test_what_does_not_fit(shapes: dict[str, list[int]], message: str, model: Model, tmp_path: Path) -> None:
    assert misfit(model, tmp_path, shapes) == message


def test_a_missing_shard(model: Model, tmp_path: Path) -> None:
    misfit(model, tmp_path, SHAPES)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    config: Any = SimpleNamespace(model=str(tmp_path), hf_config=SimpleNamespace())
    assert "has no model-2-of-2.safetensors" in str(misfit_of_reload(config, model))


def test_nothing_is_said_without_a_record(tmp_path: Path) -> None:
    assert misfit(Model(), tmp_path, {"other.weight": [2, 2]}) is None
