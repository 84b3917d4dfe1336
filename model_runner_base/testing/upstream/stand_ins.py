"""Tiny checkpoints under the names of published models, in a hub's cache that vLLM and transformers read offline."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.adapters import make_adapter
from model_runner_base.testing.images import make_seeing_model, picture
from model_runner_base.testing.models import make_checkpoint
from model_runner_base.testing.pooling import make_pooling_model
from model_runner_base.testing.tokenizer import make_tokenizer, token_texts

MAX_LENGTH = 4096
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
PICTURES = ["stop_sign.jpg", "cherry_blossom.jpg"]
"""Files that vLLM's tests read as they are imported."""
REVISION = "0" * 40


def _text(family: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        """A text model, whose tokenizer has a chat template."""
        path = make_checkpoint(family, directory).path
        tokenizer = make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(path)
        _change(path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
        _write_words(path / "model.safetensors")
        # Positions are rotated, so that there may be more of them.
        _change(path / "config.json", max_position_embeddings=MAX_LENGTH)
        return path

    return make


def _change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def _write_words(file: Path) -> None:
    """Makes a checkpoint write words that do not end, and short strings where it writes JSON: tests expect this."""
    tensors = load_file(file)
    if (head := tensors.get("lm_head.weight")) is None:
        return
    texts = token_texts()
    head *= 2  # Other tokens than special ones are then likelier by far, at a temperature of 2, too.
    head[[i for i, text in enumerate(texts) if not text]] = 0
    head[[i for i, text in enumerate(texts) if _is_common(text)]] *= 2
    save_file(tensors, file, metadata={"format": "pt"})


def _is_common(text: str) -> bool:
    return (text.startswith(" ") and bool(text.strip())) or any(character in text for character in '",]}')


def _seeing(family: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        """A model whose images have as many tokens as LLaVA's: 24 x 24 patches."""
        torch.manual_seed(0)
        path = make_seeing_model(family, directory).path
        for file in path.glob("*config.json"):
            text = re.sub(r'"(image_size|height|width|shortest_edge)": 32\b', r'"\1": 192', file.read_text())
            text = re.sub(r'"image_seq_length": 16\b', '"image_seq_length": 576', text)
            file.write_text(re.sub(r'("max_position_embeddings": )\d+', rf"\g<1>{MAX_LENGTH}", text))
        tensors = load_file(path / "model.safetensors")
        for name in filter(re.compile(r"position_embedding\.weight$").search, tensors):
            tensors[name] = torch.randn(576 + 1, tensors[name].shape[1]) / 4
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def _pooling(name: str) -> Callable[[Path], Path]:
    return lambda directory: make_pooling_model(name, directory).path


KINDS = {name: _text(name) for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral-window")}
KINDS |= {name: _seeing(name) for name in ("llava", "qwen2-vl", "qwen2.5-vl")}
KINDS |= {name: _pooling(name) for name in ("qwen3-classes",)}
"""Makers of checkpoints in a folder, by name."""


def fill_hub(hub: Path, models: Mapping[str, str], adapters: Mapping[str, str]) -> None:
    """Puts checkpoints into a hub's cache.

    Args:
        hub: the cache's folder.
        models: a name of ``KINDS`` for each name of a model.
        adapters: the same for each name of an adapter: the model that it is for.
    """
    folder = hub.with_name("made")
    made = {kind: KINDS[kind](folder / kind) for kind in {*models.values(), *adapters.values()}}
    for name, kind in models.items():
        _publish(made[kind], hub, name)
    for number, (name, kind) in enumerate(adapters.items(), 1):
        _publish(make_adapter(made[kind], folder, number).path, hub, name)


def _publish(path: Path, hub: Path, name: str) -> None:
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    shutil.copytree(path, folder / "snapshots" / REVISION, symlinks=True)


def fill_assets(folder: Path, names: Iterable[str] = PICTURES) -> None:
    """Puts pictures where vLLM keeps those that it downloads."""
    (folder / "vllm_public_assets").mkdir(parents=True)
    for seed, name in enumerate(names):
        picture(seed, 96, 64).save(folder / "vllm_public_assets" / name)
