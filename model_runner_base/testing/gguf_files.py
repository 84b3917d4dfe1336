"""GGUF files of tiny models, written as llama.cpp's converter does, each with the plain checkpoint that it stands for.

Names, permutations and blocks follow the format's published definitions. The package gguf writes the file alone.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.models import TinyModel

Packed = tuple[np.ndarray, np.ndarray]
"""Bytes of rows, and the numbers that they stand for."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names in files by those in checkpoints, both without the number of the layer and the ending."""
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
"""Architectures of files by types of models; others have one name."""
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of metadata by fields of configs."""


def q8_0(rows: np.ndarray) -> Packed:
    """Blocks of 32: a scale in float16, then 32 signed bytes."""
    blocks = rows.reshape(len(rows), -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    return _joined(scale.view(np.uint8), codes.view(np.uint8)), (codes * scale.astype(np.float32)).reshape(rows.shape)


def q4_0(rows: np.ndarray) -> Packed:
    """Blocks of 32: a scale in float16, then 16 bytes, with the first half of the numbers in their low bits."""
    blocks = rows.reshape(len(rows), -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 7).astype(np.float16)
    codes = np.rint(blocks / scale.astype(np.float32)).clip(-8, 7).astype(np.int8) + 8
    nibbles = codes.astype(np.uint8)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return _joined(scale.view(np.uint8), packed), ((codes - 8) * scale.astype(np.float32)).reshape(rows.shape)


def q4_k(rows: np.ndarray) -> Packed:
    """Blocks of 256: two float16, the scale of eight scales and that of eight minima, these with 6 bits each, then 4
    bits a number."""
    parts = rows.reshape(len(rows), -1, 8, 32)
    minima = np.maximum(-parts.min(-1), 0)
    widths = (parts.max(-1) + minima) / 15
    d, dmin = ((each.max(-1, keepdims=True) / 63).astype(np.float16) for each in (widths, minima))
    wide, wide_min = d.astype(np.float32), np.maximum(dmin.astype(np.float32), 1e-8)
    s, m = (np.rint(each / w).clip(0, 63).astype(np.uint8) for each, w in ((widths, wide), (minima, wide_min)))
    step = (wide * s)[..., None]
    least = (dmin.astype(np.float32) * m)[..., None]
    codes = np.rint((parts + least) / np.maximum(step, 1e-12)).clip(0, 15).astype(np.uint8)
    first = s[..., :4] | (s[..., 4:] >> 4) << 6
    second = m[..., :4] | (m[..., 4:] >> 4) << 6
    third = (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4
    pairs = codes.reshape(*codes.shape[:2], 4, 2, 32)
    numbers = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*codes.shape[:2], 128)
    packed = _joined(d.view(np.uint8), dmin.view(np.uint8), first, second, third, numbers)
    return packed, (step * codes - least).reshape(rows.shape)


def q6_k(rows: np.ndarray) -> Packed:
    """Blocks of 256: the low 4 bits of all numbers, their high 2 bits, 16 scales of 8 bits, and a float16 that scales
    these."""
    parts = rows.reshape(len(rows), -1, 16, 16)
    widths = np.abs(parts).max(-1) / 31
    d = (widths.max(-1, keepdims=True) / 127).astype(np.float16)
    scales = np.rint(widths / d.astype(np.float32)).clip(0, 127).astype(np.int8)
    step = (d.astype(np.float32) * scales)[..., None]
    codes = np.rint(parts / np.maximum(step, 1e-12)).clip(-32, 31).astype(np.int8)
    quarters = (codes + 32).astype(np.uint8).reshape(*codes.shape[:2], 2, 4, 32)
    one, two, three, four = (quarters[..., index, :] for index in range(4))
    low = np.concatenate(((one & 15) | (three & 15) << 4, (two & 15) | (four & 15) << 4), -1)
    high = one >> 4 | (two >> 4) << 2 | (three >> 4) << 4 | (four >> 4) << 6
    flat = (*codes.shape[:2], -1)
    packed = _joined(low.reshape(flat), high.reshape(flat), scales.view(np.uint8), d.view(np.uint8))
    return packed, (step * codes).reshape(rows.shape)


def _joined(*parts: np.ndarray) -> np.ndarray:
    """Bytes of rows of parts of blocks [rows, blocks, bytes]."""
    whole = np.concatenate(parts, -1)
    return whole.reshape(len(whole), -1)


OWN = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k}
"""Types that are packed here; the package gguf packs others."""
Kinds = Callable[[str], str]
"""Function from a tensor's name in the file to its type; vectors are always float32."""


def write_gguf(
    model: TinyModel,
    directory: Path,
    kinds: Kinds = lambda name: "Q8_0",
    metadata: Callable[[Any, str], None] = lambda writer, architecture: None,
) -> tuple[Path, TinyModel]:
    """Writes the GGUF file of a model, and the plain checkpoint that the file stands for.

    Args:
        metadata: adds further metadata to the writer, for the architecture.
    """
    import gguf

    config = json.loads((model.path / "config.json").read_text())
    if "num_local_experts" in config:  # The name in newer releases of transformers.
        config["num_experts"] = config["num_local_experts"]
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, architecture, config)
    metadata(writer, architecture)
    plain: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, tuple[str, np.ndarray]]] = {}

    def add(name: str, own: str, values: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Adds a tensor, ``values`` as the file has them, and returns the numbers that the file stands for."""
        rows = values.reshape(-1, values.shape[-1])
        kind = "F32" if values.ndim == 1 else kinds(own)
        number = gguf.GGMLQuantizationType[kind]
        if kind in OWN:
            packed, meant = OWN[kind](rows)
        else:
            packed = gguf.quants.quantize(rows, number)
            meant = gguf.quants.dequantize(packed, number)
        writer.add_tensor(own, packed.reshape(*values.shape[:-1], -1), raw_dtype=number)
        return change(meant.reshape(values.shape).astype(np.float32))

    for name, tensor in load_file(model.path / "model.safetensors").items():
        values = tensor.float().numpy()
        if expert := re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)_proj\.weight", name):
            layer = re.findall(r"\.(\d+)\.", name)[0]
            own = f"blk.{layer}.ffn_{expert[3]}_exps.weight"
            stacks.setdefault(own, {})[int(expert[2])] = name, values
            continue
        own = name_in_file(name, architecture)
        before, after = _changes(name, architecture, config, values.shape)
        plain[name] = torch.from_numpy(add(name, own, before(values), after).copy())
    for own, experts in stacks.items():
        whole = np.stack([experts[index][1] for index in range(len(experts))])
        for index, values in enumerate(add(own, own, whole, lambda meant: meant)):
            plain[experts[index][0]] = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = directory / "plain"
    reference.mkdir()
    for file in model.path.iterdir():
        (reference / file.name).write_bytes(file.read_bytes())
    save_file(plain, reference / "model.safetensors", metadata={"format": "pt"})
    return path, TinyModel(reference)


def name_in_file(name: str, architecture: str) -> str:
    known = NAMES | (GEMMA_NAMES if architecture.startswith("gemma") else {})
    plain, _, ending = name.rpartition(".")
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", plain):
        return f"blk.{layer[1]}.{known[layer[2]]}.{ending}"
    return f"{known[plain]}.{ending}"


Change = Callable[[np.ndarray], np.ndarray]


def _changes(name: str, architecture: str, config: dict[str, Any], shape: tuple[int, ...]) -> tuple[Change, Change]:
    """Change that the converter makes to a tensor, and the one that takes it back."""
    if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
        # A head's rotary rows are pairs of neighbours in the file, and two halves in the checkpoint.
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = np.arange(shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
        return lambda values: values[rows], lambda values: values[np.argsort(rows)]
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return lambda values: values + np.float32(1), lambda values: values - np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return np.ravel, lambda values: values[None]
    return lambda values: values, lambda values: values


def _add_metadata(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    known = dict(config)
    if architecture.startswith("gemma") or config.get("use_sliding_window", architecture == "phi3"):
        known["attention.sliding_window"] = config.get("sliding_window") or 0
    parameters = config.get("rope_parameters") or config
    parameters = parameters.get("full_attention", parameters)
    known["rope.freq_base"] = float(parameters.get("rope_theta", 10000.0))
    for field, value in known.items():
        key = KEYS.get(field, field if "." in field else None)
        if key is None or value is None:
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
