"""Tiny checkpoints of vision and audio models, each with a processor of its own; HF transformers is the reference."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.models import vary
from model_runner_base.testing.tokenizer import make_tokenizer

# Typed loosely: transformers loads its classes on demand.
hf: Any = transformers

_ZEROS = {"idefics3": ("vision_model.embeddings.position_embedding.weight",)}
"""Names of tensors that are zero, by family: in float32, transformers 4.57.6 gives a patch the position of the one
before it."""

_NO_PLACEHOLDERS = ("gemma4", "gemma4-windows")
"""Families that never answer with a special token: transformers embeds a placeholder in an answer as padding."""

_WIDE = {"qwen3-vl-moe": {"gate_up_proj": 1, "down_proj": 2}}
"""The dimension of the hidden size in experts of published checkpoints, by family and name."""

Family = tuple[Any, Any, str]
"""A config, a processor, and the placeholder: the text in place of an item in a prompt."""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE + 16,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def special_tokenizer(*special: str, **named: str) -> Any:
    """The kit's tokenizer as a class that the processors take, with more special tokens; those in ``named`` become
    attributes of it, as the processors read them."""
    plain = make_tokenizer()
    tokenizer = hf.Qwen2TokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        unk_token=None,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens=named,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


@cache
def reference(path: Path) -> tuple[Any, Any]:
    """A checkpoint's model in float32 and its processor."""
    (name,) = hf.AutoConfig.from_pretrained(path).architectures
    model = getattr(hf, name).from_pretrained(path, dtype=torch.float32)
    return model.eval(), hf.AutoProcessor.from_pretrained(path)


@torch.no_grad()
def continued(path: Path, count: int, **prompt: Any) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and the reference's next ``count``; ``prompt`` are the arguments of the checkpoint's
    processor."""
    model, processor = reference(path)
    inputs = processor(**prompt, return_tensors="pt").to(torch.float32)  # Llama 4's makes pixels of bfloat16.
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens: list[int] = out[0].tolist()
    return tokens[:-count], tokens[-count:]


def make_processed_model(name: str, directory: Path, family: Callable[[], Family]) -> tuple[Path, str]:
    """Writes a tiny checkpoint with its processor, unless it is there; returns its path and its placeholder."""
    config, processor, placeholder = family()
    path = directory / name
    if not path.exists():
        torch.manual_seed(sum(map(ord, name)))
        name_of_class = type(config).__name__.replace("Config", "ForConditionalGeneration")
        model = getattr(hf, name_of_class)._from_config(config)
        for tensor_name, tensor in model.named_parameters():
            vary(tensor_name, tensor)
            if tensor_name.endswith(_ZEROS.get(name, ())):
                torch.nn.init.zeros_(tensor)
        if name in _NO_PLACEHOLDERS:
            torch.nn.init.zeros_(model.lm_head.weight[VOCAB_SIZE:])
        model.save_pretrained(path)
        _store_as_published(name, path / "model.safetensors")
        processor.save_pretrained(path)
    return path, placeholder


def _store_as_published(name: str, path: Path) -> None:
    """Renames and transposes a family's tensors as in published checkpoints, which vLLM expects.

    Newer releases of transformers leave a level out of the names of CLIP's and SigLIP's towers, write a level of the
    names of Qwen2-Audio's decoder twice, and do not transpose the experts of Qwen3-VL back.
    """
    tensors = load_file(path)
    levels = {"language_model.model.model.": "language_model.model."}
    if any("vision_tower.post_layernorm." in each for each in tensors):
        levels["vision_tower."] = "vision_tower.vision_model."
    for written, meant in levels.items():
        tensors = {each.replace(written, meant): tensor for each, tensor in tensors.items()}
    for each, tensor in tensors.items():
        wide = _WIDE.get(name, {}).get(each.rpartition(".")[2])
        if wide and tensor.shape[wide] != TEXT["hidden_size"]:
            tensors[each] = tensor.mT.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
