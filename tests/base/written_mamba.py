"""Mamba 2 with several groups of channels, from the published formula, token by token and without a cache.

Transformers norms the outputs of all groups as one, so it is no reference. The published layer (mamba_ssm's) norms each
group by itself.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from written_references import Reference, Weights, write

from model_runner_base.testing.architectures import VOCAB_SIZE

HIDDEN, HEADS, HEAD, STATE, GROUPS, KERNEL = 64, 8, 16, 16, 2, 4
INNER = HEADS * HEAD
MIXED = INNER + 2 * GROUPS * STATE
EPSILON = 1e-5
MAMBA_2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_heads": HEADS,
    "head_dim": HEAD,
    "expand": INNER // HIDDEN,
    "state_size": STATE,
    "n_groups": GROUPS,
    "conv_kernel": KERNEL,
    "chunk_size": 16,
    "layer_norm_epsilon": EPSILON,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def mamba_2(path: Path, config: dict[str, Any]) -> Reference:
    """A checkpoint of Mamba 2, and its model."""
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (VOCAB_SIZE, HIDDEN),
        "backbone.norm_f.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"backbone.layers.{index}"
        shapes |= {
            f"{layer}.norm.weight": (HIDDEN,),
            f"{layer}.mixer.in_proj.weight": (INNER + MIXED + HEADS, HIDDEN),
            f"{layer}.mixer.conv1d.weight": (MIXED, 1, KERNEL),
            f"{layer}.mixer.conv1d.bias": (MIXED,),
            **{f"{layer}.mixer.{name}": (HEADS,) for name in ("A_log", "D", "dt_bias")},
            f"{layer}.mixer.norm.weight": (INNER,),
            f"{layer}.mixer.out_proj.weight": (HIDDEN, INNER),
        }
    weights = write(path, config, shapes)
    return lambda ids: _logits(config, weights, ids)


def _logits(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    x = weights["backbone.embeddings.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"backbone.layers.{index}"
        x = x + _block(weights, f"{layer}.mixer", _norm(x, weights[f"{layer}.norm.weight"]))
    return _norm(x, weights["backbone.norm_f.weight"]) @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Divides each group of channels by its own root mean square."""
    parts = x.unflatten(-1, (groups, -1))
    return (parts / (parts.square().mean(-1, keepdim=True) + EPSILON).sqrt()).flatten(-2) * weight


def _block(weights: Weights, block: str, x: Tensor) -> Tensor:
    gate, mixed, step = (x @ weights[f"{block}.in_proj.weight"].T).split([INNER, MIXED, HEADS], dim=-1)
    past = functional.pad(mixed, (0, 0, KERNEL - 1, 0)).unfold(0, KERNEL, 1)  # [T, MIXED, KERNEL]
    mixed = (past * weights[f"{block}.conv1d.weight"][:, 0]).sum(-1) + weights[f"{block}.conv1d.bias"]
    values, written, read = functional.silu(mixed).split([INNER, GROUPS * STATE, GROUPS * STATE], dim=-1)
    step = functional.softplus(step + weights[f"{block}.dt_bias"])
    decay = torch.exp(-step * weights[f"{block}.A_log"].exp())
    values = values.unflatten(-1, (HEADS, HEAD))
    # Heads that lie next to each other share what a token writes and reads by.
    written, read = (
        each.unflatten(-1, (GROUPS, STATE)).repeat_interleave(HEADS // GROUPS, dim=1) for each in (written, read)
    )
    state = torch.zeros(HEADS, HEAD, STATE)
    outputs = []
    for token in range(len(x)):
        change = (step[token, :, None] * values[token])[:, :, None] * written[token, :, None]
        state = decay[token, :, None, None] * state + change
        outputs.append((state * read[token, :, None]).sum(-1) + weights[f"{block}.D"][:, None] * values[token])
    gated = torch.stack(outputs).flatten(1) * functional.silu(gate)
    return _norm(gated, weights[f"{block}.norm.weight"], GROUPS) @ weights[f"{block}.out_proj.weight"].T
