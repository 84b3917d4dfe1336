"""What vLLM's LoRA layers read of the wrapper around their products."""

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase


def embeddings_indices(first_rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``first_rows`` [T] of each token's table, as embeddings look for them: two alike in releases whose checkpoints
    could bring tokens of their own, which those without whole heads of adapters are."""
    return first_rows if hasattr(PunicaWrapperBase, "apply_lora_full_linear") else (first_rows, first_rows)
