"""Tiny hybrid models that the older lane's transformers has no class of; the newest lane's answers are recorded.

``.venv-newest/bin/python tests/base/recorded_recurrent.py`` writes ``recorded_recurrent.json`` anew: for each model its
config, the shapes of its checkpoint's tensors, and by transformers 5.20.2 in float32, greedy tokens and the log
probabilities of some prompts' tokens. A tensor's numbers are drawn by its name, so that every lane makes the same
checkpoint.
"""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load_file, save_file

RECORDED = Path(__file__).with_suffix(".json")
NAMES = ["lfm2-moe", "nemotron-h", "nemotron-h-moe", "kimi-linear"]
LENGTHS = [1, 2, 3, 5, 16, 33, 64, 90, 130, 200]
NEW_TOKENS = 16
VALUED = slice(4, 8)
"""Prompts whose log probabilities are recorded."""
PATTERNS = {"nemotron-h": "M*-", "nemotron-h-moe": "ME*E"}
"""Layers as older releases read them."""


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def older_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """A recorded config as older releases read it."""
    if name not in PATTERNS:
        return config
    kept = {key: value for key, value in config.items() if key not in ("layers_block_type", "layer_types")}
    told = {"hybrid_override_pattern": PATTERNS[name], "num_hidden_layers": len(PATTERNS[name])}
    return kept | told | {"time_step_limit": [0.0, math.inf]}


def write_checkpoint(path: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: _drawn(name, shape, config["tie_word_embeddings"]) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str, shape: list[int], is_tied: bool) -> torch.Tensor:
    """Numbers as ``testing.models.make_checkpoint`` draws them: large, so that greedy outputs vary."""
    numbers = torch.from_numpy(np.random.default_rng(crc32(name.encode())).standard_normal(shape, dtype=np.float32))
    if "embed" in name and is_tied:
        return numbers * 0.05
    if len(shape) > 1:
        return numbers * 0.25
    return numbers * 0.1 if name.endswith("bias") else 1 + numbers * 0.2


def _record(name: str, directory: Path) -> dict[str, Any]:
    from model_runner_base.testing.cases import random_prompts
    from model_runner_base.testing.models import TinyModel, make_checkpoint
    from model_runner_base.testing.reference import logits_after
    from model_runner_base.testing.rules import log_softmax

    made = make_checkpoint(name, directory).path
    shapes = {key: list(tensor.shape) for key, tensor in load_file(made / "model.safetensors").items()}
    config = json.loads((made / "config.json").read_text())
    write_checkpoint(directory / "drawn" / name, config, shapes)
    model = TinyModel(directory / "drawn" / name)
    prompts = random_prompts(90, LENGTHS)
    answers = [[list(prompt), model.greedy(prompt, NEW_TOKENS)] for prompt in prompts]
    values = []
    for prompt in prompts[VALUED]:
        given = log_softmax(logits_after(model, prompt).astype(np.float64))[np.arange(len(prompt) - 1), prompt[1:]]
        values.append(given.round(6).tolist())
    return {"config": config, "shapes": shapes, "answers": answers, "values": values}


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        RECORDED.write_text(json.dumps({name: _record(name, Path(directory)) for name in NAMES}))
