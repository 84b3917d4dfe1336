"""Tiny checkpoints of DeepSeek V4, of layers of all kinds, under published names.

Transformers reads these names, and writes some others, which vLLM's class does not know.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model_runner_base.testing.architectures import VOCAB_SIZE, hf
from model_runner_base.testing.models import TinyModel, vary

WINDOW, COUNT, RATES = 24, 6, (4, 128)
"""Positions of a window, entries that a token sees of those that it chooses from, and tokens of an entry."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "head_dim": 512,  # vLLM's class knows no other sizes of heads.
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": COUNT,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "topk_method": "noaux_tc",
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "hc_sinkhorn_iters": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
PUBLISHED = {
    r"^model\.": "",
    r"^embed_tokens\.": "embed.",
    r"^hc_head\.hc_": "hc_head_",
    r"\.attn\.norm\.": ".attn.kv_norm.",
    r"\.compressor\.indexer\.(ape|norm|wkv|wgate|kv_norm|position_bias)": r".indexer.compressor.\1",
}
"""Names of tensors as transformers writes them, and in a published checkpoint."""


def make_compressed(path: Path, **changes: Any) -> TinyModel:
    """Writes a checkpoint to ``path``, with ``changes`` of its config."""
    config = hf.DeepseekV4Config(**SIZES | changes)
    torch.manual_seed(6)
    model = hf.DeepseekV4ForCausalLM(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(dim=1)[:, : tensor.shape[1]])
        elif name.endswith("correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
        elif name.endswith(("sinks", "position_bias", ".base", "hc_base")):
            torch.nn.init.normal_(tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            vary(name, tensor)
            if name.endswith(("experts.gate_up_proj", "experts.gate_proj.weight", "experts.up_proj.weight")):
                tensor.data *= 3  # So that many numbers exceed the limit.
    model.save_pretrained(path)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for pattern, replacement in PUBLISHED.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    return TinyModel(path)
