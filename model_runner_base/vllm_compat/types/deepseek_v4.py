"""vLLM's class of DeepSeek V4, which only later releases have, made without what only a GPU has."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from model_runner_base.vllm_compat.patches.without_indexer import OnHost
from model_runner_base.vllm_compat.probes.models import DEEPSEEK_V4, is_deepseek_v4

OF_HOST = "vllm.models.deepseek_v4.cpu.model"
"""Module of the class whose decoder layers are plain, but for attention."""


class _WithoutEvents:
    """View of a module, and of the modules in it, whose ``Event`` makes placeholders: not every device has streams."""

    Event = object

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _WithoutEvents(found) if isinstance(found, ModuleType) else found


@contextmanager
def plain_deepseek_v4(vllm_config: VllmConfig) -> Iterator[None]:
    """Has vLLM make DeepSeek V4, inside the block, of the class for hosts, with attention that has no kernels.

    The class that vLLM's registry names makes streams of a GPU as it is made. Does nothing for other models.
    """
    if not is_deepseek_v4(vllm_config.model_config.architecture):
        yield
        return
    from vllm.models.deepseek_v4 import attention, compressor
    from vllm.models.deepseek_v4.cpu import model

    with ExitStack() as stack:
        stack.enter_context(patch.dict(ModelRegistry.models))
        ModelRegistry.register_model(DEEPSEEK_V4, f"{OF_HOST}:{DEEPSEEK_V4}")
        stack.enter_context(patch.object(attention, "torch", _WithoutEvents(torch)))
        stack.enter_context(patch.object(model, "DeepseekV4CPUAttention", _attention_class()))
        for module in (compressor, model):
            stack.enter_context(patch.object(module, "current_platform", OnHost(module.current_platform)))
        yield


def spec_of_pages(block_size: int, page_bytes: int, dtype: torch.dtype, window: int) -> Any:
    """KV-cache spec of pages of ``page_bytes``, one for each ``block_size`` tokens: for a whole request, or for
    ``window`` tokens."""
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec  # type: ignore[attr-defined]

    options: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": page_bytes // (block_size * dtype.itemsize),
        "dtype": dtype,
    }
    return SlidingWindowMLASpec(sliding_window=window, **options) if window else MLAAttentionSpec(**options)


def _attention_class() -> type[Any]:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

    class PlainAttention(DeepseekV4Attention):
        """Attention whose ``forward`` and backend are given to its instances, after loading."""

        use_fp8_ds_mla_layout = False

        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            return num_heads

        def forward_mqa(self, *_: Any) -> None:
            raise NotImplementedError

        def _o_proj(self, *_: Any) -> torch.Tensor:
            raise NotImplementedError

    return PlainAttention
