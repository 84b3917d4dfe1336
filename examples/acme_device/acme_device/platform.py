"""Answers to what vLLM asks about the device before it starts."""

from typing import Any

from model_runner_base.platform import PagedPlatform


class AcmePlatform(PagedPlatform):
    device_name = device_type = "cpu"  # the type of torch.device
    worker_cls = "acme_device.worker.AcmeWorker"

    @classmethod
    def shares_host_memory(cls, vllm_config: Any) -> bool:
        return False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        # The base's method refuses what cannot run.
        chosen = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return chosen if attn_selector_config.use_mla else "acme_device.attention.AcmeAttentionBackend"
