"""Answers to what vLLM asks about the device before it starts."""

from typing import Any

import torch

from model_runner_base.platform import PagedPlatform


class TarnPlatform(PagedPlatform):
    device_name = device_type = "cpu"  # the type of torch.device
    worker_cls = "tarn_device.worker.TarnWorker"
    dtypes = (torch.bfloat16,)  # Another dtype is refused, and "auto" is this one.
    has_cache_lines = True  # A block holds a whole request.
    default_max_num_batched_tokens = 128
    default_max_num_seqs = 8

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        # The base's method refuses what cannot run, and names the attention of latents.
        chosen = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return chosen if attn_selector_config.use_mla else "tarn_device.attention.TarnAttentionBackend"
