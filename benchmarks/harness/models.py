"""Models for benchmarks: vLLM's own Llama in any shape, with random weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BUNDLED_MODEL = Path(__file__).parents[2] / "examples" / "models" / "kjv-2m"
MIDDLING = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
"""Sizes of a Llama whose products take most of a step's time; two layers have some 40M parameters."""


@contextmanager
def random_llama(num_layers: int, hidden_size: int = 64, num_heads: int = 4, vocab_size: int = 512) -> Iterator[Path]:
    """A checkpoint directory to be loaded with ``load_format="dummy"``: it holds no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield Path(directory)


@contextmanager
def saved_llama(**config: Any) -> Iterator[Path]:
    """A checkpoint with random weights, the same every time; ``config`` is LlamaConfig's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with TemporaryDirectory() as directory:
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(directory)
        yield Path(directory)
