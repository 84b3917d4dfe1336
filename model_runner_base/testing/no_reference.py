"""Places at which transformers differs from published code, and is therefore no reference.

A checkpoint at such a place ends with an error that names it, before its tokens are compared.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

FLOORED = ("NemotronHMamba2Mixer", "Zamba2MambaMixer")
"""Classes of transformers that limit time steps from below by ``time_step_min``, which published code reads only when
it draws initial weights."""


class NoReferenceError(ValueError):
    """Error of a checkpoint, or of a prompt, that transformers computes otherwise than published code."""


def watch(model: Any, path: Path) -> None:
    """Raises NoReferenceError if a model loaded from ``path`` is at such a place, and has its forward do so."""
    _check_padding(model, path)
    for name, layer in model.named_modules():
        _check_groups(name, layer)
        if type(layer).__name__ in FLOORED:
            _watch_time_steps(name, layer, model.config.time_step_min)


def _check_padding(model: Any, path: Path) -> None:
    """Looks for the row of the padding token, which some classes (Youtu) set to zeros again after loading."""
    embeddings = model.get_input_embeddings()
    name = next((name for name, part in model.named_modules() if part is embeddings), "")
    row = getattr(embeddings, "padding_idx", None)
    if row is None or embeddings.weight[row].any():
        return
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if f"{name}.weight" in tensors.keys() and tensors.get_slice(f"{name}.weight")[row : row + 1].any():  # noqa: SIM118
                raise NoReferenceError(
                    f"transformers zeroes row {row} of {name}, the padding token's, and published code does not: set "
                    "pad_token_id to null in config.json"
                )


def _check_groups(name: str, layer: Any) -> None:
    """Looks for Mamba 2 with several groups, over which published code norms one by one."""
    norm = getattr(layer, "norm", None)
    is_whole = type(norm).__name__.endswith("RMSNormGated") and not {"group_size", "n_groups"} & {*vars(norm)}
    if is_whole and getattr(layer, "n_groups", 1) > 1:
        raise NoReferenceError(
            f"transformers norms {name} over its whole width, and published code by groups: compare a checkpoint with "
            "n_groups=1"
        )


def _watch_time_steps(name: str, layer: Any, floor: float) -> None:
    def check(_: nn.Module, __: Any, projected: torch.Tensor) -> None:
        steps = F.softplus(projected[..., -layer.num_heads :].float() + layer.dt_bias.float())
        if (steps < floor).any():
            raise NoReferenceError(
                f"transformers floors dt at time_step_min={floor} in {name}, and published code does not: set "
                "time_step_min to 1e-30 in config.json, which vLLM does not read"
            )

    layer.in_proj.register_forward_hook(check)
