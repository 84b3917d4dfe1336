"""Tiny checkpoints of MiniMax M3 whose layers see chosen blocks, under published names, and transformers' own.

vLLM's class reads published names alone, of settings and of tensors, and transformers writes others.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.architectures import UNTIED, hf
from model_runner_base.testing.models import OF_TRANSFORMERS, TinyModel, vary

BLOCK, COUNT, NUM_LAYERS = 16, 3, 3
"""Positions of a block, blocks that a token sees, and layers, of which the first sees all keys."""
NUM_EXPERTS = 8
_ROTARY = {"rope_theta": 5e6, "partial_rotary_factor": 0.5}


def make_block_sparse(
    path: Path,
    count: int = COUNT,
    num_kv_heads: int = UNTIED["num_key_value_heads"],
    experts_per_token: int = 2,
) -> TinyModel:
    """Writes a checkpoint to ``path``: tokens of its sparse layers see ``count`` blocks in each KV head."""
    shape = UNTIED | {"intermediate_size": 32, "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": num_kv_heads}
    sizes = {"head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 128, "shared_intermediate_size": 32}
    experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": experts_per_token}
    config = hf.MiniMaxM3VLTextConfig(
        **shape,
        **sizes,
        **experts,
        rope_parameters=_ROTARY | {"rope_type": "default"},
        mlp_layer_types=["dense"] + ["sparse"] * (NUM_LAYERS - 1),
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * (NUM_LAYERS - 1),
        index_n_heads=num_kv_heads,
        index_head_dim=sizes["head_dim"],
        index_block_size=BLOCK,
        index_topk_blocks=count,
        index_local_blocks=1,
    )
    torch.manual_seed(4)
    model = hf.MiniMaxM3VLForCausalLM(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
        elif isinstance(tensor, torch.nn.Parameter):
            vary(name, tensor)
    model.save_pretrained(path / OF_TRANSFORMERS)
    tensors = load_file(path / OF_TRANSFORMERS / "model.safetensors")
    save_file(dict(pair for each in tensors.items() for pair in _published(*each)), path / "model.safetensors")
    frequency = [0] + [1] * (NUM_LAYERS - 1)
    text = {name: getattr(config, name) for name in shape} | sizes | experts | _ROTARY
    text |= {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "moe_layer_freq": frequency,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": sizes["head_dim"],
            "sparse_num_index_heads": num_kv_heads,
            "sparse_topk_blocks": count,
            "sparse_block_size": BLOCK,
            "sparse_local_block": 1,
            "sparse_attention_freq": frequency,
        },
    }
    whole = {"model_type": "minimax_m3_vl", "architectures": text["architectures"], "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    return TinyModel(path)


def _published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers' as tensors of a published checkpoint."""
    for theirs, ours in {
        ".self_attn.indexer.": ".self_attn.index_",
        ".mlp.gate.e_score": ".mlp.e_score",
    }.items():
        name = name.replace(theirs, ours)
    if ".layers.0." not in name:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." in name:
        names = ("w1", "w3") if "gate_up" in name else ("w2",)
        for number, expert in enumerate(tensor):
            for of_expert, part in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{name.rpartition('.')[0]}.{number}.{of_expert}.weight", part.contiguous()
    elif "gate_up_proj" in name:
        for part, each in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up_proj", part), each.contiguous()
    else:
        yield name, tensor
