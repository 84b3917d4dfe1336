"""Tiny models with random weights, one an architecture, and greedy decoding of them by HF transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
MAX_LENGTH = 512

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=16, sliding_window=None, tie_word_embeddings=False),
    "mistral-window": lambda: MistralConfig(**_SHAPE, head_dim=16, sliding_window=40, tie_word_embeddings=False),
    "gemma": lambda: GemmaConfig(**(_SHAPE | {"num_key_value_heads": 1}), head_dim=32),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        word_embed_proj_dim=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and its reference."""

    path: Path

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """The reference's next ``count`` tokens, end-of-sequence ignored."""
        return _greedy(self.path, prompt, count)


@cache
def _reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
@torch.no_grad()
def _greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = _reference(path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def make_checkpoint(name: str, directory: Path) -> TinyModel:
    """Writes a tiny checkpoint whose greedy outputs vary: large weights keep it from repeating one token."""
    path = directory / name
    if not path.exists():
        torch.manual_seed(sum(map(ord, name)))
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.25)
            elif parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(path)
    return TinyModel(path)
