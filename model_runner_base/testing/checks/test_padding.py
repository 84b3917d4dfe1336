"""Padding of a step, whatever is in it, reaches no request."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

from safetensors.torch import load_file, save_file
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

PADDING = 0
"""The token id of padding, which no prompt here has."""
LENGTHS = [1, 3, 17, 40, 64, 65, 150]


def poisoned(model: TinyModel, directory: Path) -> Path:
    """Makes a copy of a checkpoint in which the embedding of padding is NaN."""
    path = Path(copytree(model.path, directory / "poisoned"))
    tensors = load_file(path / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][PADDING] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_padding_of_nan(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Padding whose numbers are all NaN changes no token."""
    model = tiny_model("llama")
    llm = engine(poisoned(model, tmp_path))
    prompts = random_prompts(3, LENGTHS)
    assert not any(PADDING in model.greedy(prompt, 6, is_certain=False) for prompt in prompts)
    hint = "padding has NaN, which reaches a request if a kernel mixes the rows of a step"
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(6))), [6] * len(prompts), hint=hint)
