"""Attributes that vLLM's LoRA layers read from the wrapper around their products."""

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase


def embeddings_indices(first_rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``first_rows`` [T] of each token's table, in the form in which embeddings read them.

    In releases whose adapters could bring tokens of their own, that is two equal tensors. Those releases have no
    ``apply_lora_full_linear``.
    """
    return first_rows if hasattr(PunicaWrapperBase, "apply_lora_full_linear") else (first_rows, first_rows)
