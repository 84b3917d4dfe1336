"""Corrects ModernBERT's layers where vLLM's model differs from its authors'."""

import torch
from torch import nn
from vllm.model_executor.models.modernbert import ModernBertAttention


def correct_modernbert(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives local layers their window, and all layers rotations that are as exact as ``dtype``, the model's.

    A token sees ``local_attention // 2`` tokens on each side. Some releases give the layer that number as a window, and
    a window counts the token itself. vLLM keeps the rotations in float16.
    """
    for module in model.modules():
        if isinstance(module, ModernBertAttention):
            if module.attn.sliding_window is not None:
                module.attn.sliding_window = module.config.local_attention // 2 + 1
            rotary = module.rotary_emb
            rotary.dtype = dtype
            rotary.register_buffer("cos_sin_cache", rotary._compute_cos_sin_cache().to(dtype), persistent=False)
