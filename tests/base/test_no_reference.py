"""Checkpoints that transformers computes otherwise than published code: the kit's reference says so."""

from pathlib import Path

import pytest
import torch
from lane import HAS_OPENXLA
from safetensors.torch import load_file, save_file

from model_runner_base.testing import models, recurrent_architectures, swept_architectures
from model_runner_base.testing.models import TinyModel, make_checkpoint, reference_model
from model_runner_base.testing.no_reference import NoReferenceError
from model_runner_base.testing.reference import logits_after

PROMPT = (5, 6, 7, 8)
LATER = pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no such class")


def checkpoint(name: str, path: Path, monkeypatch: pytest.MonkeyPatch, **fields: object) -> TinyModel:
    """A checkpoint of the kit's config with other fields."""
    found = next(each for each in (recurrent_architectures.RECURRENT, swept_architectures.SWEPT) if name in each)
    config = found[name]()
    for field, value in fields.items():
        setattr(config, field, value)
    monkeypatch.setitem(models.RECURRENT, name, lambda: config)
    return make_checkpoint(name, path)


def with_small_steps(model: TinyModel) -> None:
    """Lowers the biases of all time steps, so that they are about 1e-4."""
    file = model.path / "model.safetensors"
    tensors = load_file(file)
    changed = {name: tensor * 0 - 9 for name, tensor in tensors.items() if name.endswith("dt_bias")}
    assert changed
    save_file(tensors | changed, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["zamba2", pytest.param("nemotron-h", marks=LATER)])
def test_floored_time_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(name, tmp_path, monkeypatch, time_step_min=0.001)
    with_small_steps(model)
    with pytest.raises(NoReferenceError, match=r"floors dt at time_step_min=0.001 in .* published code does not: set"):
        logits_after(model, PROMPT)


def test_the_kits_own_steps_are_not_floored(tmp_path: Path) -> None:
    """Steps as small are compared in the kit's own config."""
    model = make_checkpoint("zamba2", tmp_path)
    with_small_steps(model)
    assert len(logits_after(model, PROMPT)) == len(PROMPT)


def test_norms_of_several_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint("mamba2", tmp_path, monkeypatch, n_groups=2)
    with pytest.raises(NoReferenceError, match=r"norms .* over its whole width, and published code by groups"):
        reference_model(model.path)


@LATER
def test_zeroed_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of zeros in the checkpoint is no difference."""
    model = checkpoint("youtu", tmp_path / "stored", monkeypatch, pad_token_id=2)
    file = model.path / "model.safetensors"
    tensors = load_file(file)
    rows = tensors["model.embed_tokens.weight"]
    with pytest.raises(NoReferenceError, match=r"zeroes row 2 of model\.embed_tokens, .* set pad_token_id to null"):
        reference_model(model.path)
    rows[2] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(reference_model(model.path).get_input_embeddings().weight, rows)
