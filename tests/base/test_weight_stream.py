"""One stream of weights: the first load reads it, a draft's, a reload of a checkpoint or of what is handed over."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import engine
from greedy import expected, generate
from safetensors.torch import load_file, save_file
from test_reload import other_weights, reload_weights

from model_runner_base.models.weight_stream import Weights, WeightStream
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import metric
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(20, [5, 30, 70])


def scaled(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor * 3 if name.endswith("down_proj.weight") else tensor


def scaled_on_disk(model: TinyModel, directory: Path) -> TinyModel:
    """Checkpoint with these weights, for the reference."""
    directory.mkdir()
    for file in model.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = dict(scaled(load_file(model.path / "model.safetensors").items()))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(directory)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that are loaded; their weights are scaled on the way."""
    paths, whole = [], WeightStream.weights

    def weights(stream: WeightStream, source: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        paths.append(stream._model_config.model)
        return whole(stream, scaled(source))

    monkeypatch.setattr(WeightStream, "weights", weights)
    return paths


@pytest.mark.parametrize("draft", ["same", "head"])
def test_every_load_reads_one_stream(
    draft: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path, loaded: list[str]
) -> None:
    model = tiny_model("llama")
    other = other_weights(model, tmp_path / "other")
    want, want_other = (scaled_on_disk(each, tmp_path / f"{each.path.name}-scaled") for each in (model, other))
    assert expected(want, PROMPTS) != expected(model, PROMPTS)
    assert expected(want_other, PROMPTS) != expected(other, PROMPTS)
    config = speculation(draft, model)
    with engine(model.path, max_model_len=128, speculative_config=config, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(want, PROMPTS)
        if draft == "same":  # All but those after the end of a request: the draft is scaled like the model.
            drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
            assert accepted > 0.8 * drafted > 0
        reload_weights(llm, weights_path=str(other.path))
        assert generate(llm, PROMPTS) == expected(want_other, PROMPTS)
        reload_weights(llm, weights_iterator=list(load_file(model.path / "model.safetensors").items()))
        assert generate(llm, PROMPTS) == expected(want, PROMPTS)
    assert loaded == [str(model.path), config["model"], str(other.path), str(other.path)]
