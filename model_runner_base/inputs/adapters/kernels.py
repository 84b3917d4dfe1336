"""vLLM's LoRA kernels, which get their slots from the step's graph.

``PunicaWrapperGPU`` runs a grid of programs for each slot, over the tokens that have it. Its kernels read those tokens
from buffers, ``LoRAKernelMeta``. vLLM's runner fills the buffers before each step, and waits for the device meanwhile.
Here the graph fills them, from the slots in the packed buffer. So one graph serves every batch, and a repeated step
sends nothing.

Example: two slots and four tokens. The first and the last token have the adapter in slot 1, the second none, the third
the one in slot 0. Every slot has a place in the buffers, even if no token has it:

    token_lora_mapping                  1 -1  0  1
    active_lora_ids                    -1  0  1      programs of the first return at once
    num_tokens_per_lora                 1  1  2
    lora_token_start_loc                0  1  2  4
    token_indices_sorted_by_lora_ids    1  2  0  3
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.adapters.slots import NO_SLOT, SlotLayer
from model_runner_base.step.graph_policy import WrapFunction


class KernelProducts:
    """Products in place, for platforms whose ``can_update_inplace`` is True and whose graphs read fixed addresses."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    """Types that the kernels take (``vllm/lora/ops/triton_ops``), for inputs and matrices alike."""

    def __init__(self, wrapper: PunicaWrapperGPU) -> None:
        self.vocab_size = 0
        self._wrapper = wrapper
        self._metas: list[Any] = [wrapper.token_mapping_meta, wrapper.prompt_mapping_meta]
        for meta in self._metas:
            ids = meta.active_lora_ids
            ids.copy_(torch.arange(NO_SLOT, len(ids) - 1, device=ids.device))

    @classmethod
    def check(cls, vllm_config: VllmConfig) -> None:
        """Raises UnsupportedConfigError for settings that the kernels, or one graph for all batches, cannot serve."""
        lora, dtype = vllm_config.lora_config, vllm_config.model_config.dtype
        assert lora is not None
        if dtype not in cls.dtypes:
            raise UnsupportedConfigError(f"vLLM's LoRA kernels do not take {dtype}: use --dtype bfloat16 or float16")
        if lora.lora_dtype != dtype:
            raise UnsupportedConfigError(
                f"vLLM's LoRA kernels take no {lora.lora_dtype} adapters with a {dtype} model: leave out lora_dtype"
            )
        if lora.specialize_active_lora:
            raise UnsupportedConfigError(
                "specialize_active_lora is not supported, since one graph serves every batch: leave it out"
            )

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        for meta, slots in zip(self._metas, (token_slots, logits_slots), strict=True):
            num_tokens = (slots[:, None] == meta.active_lora_ids).sum(0)
            meta.token_lora_mapping[: len(slots)] = slots
            meta.token_indices_sorted_by_lora_ids[: len(slots)] = slots.argsort(stable=True)
            meta.num_tokens_per_lora.copy_(num_tokens)
            meta.lora_token_start_loc[1:] = num_tokens.cumsum(0)
        # VocabParallelEmbeddingWithLoRA adds these to the tokens' ids to find their rows in the tables of all slots.
        table_starts = token_slots.clamp(min=0) * self.vocab_size
        self._wrapper._embeddings_indices[..., : len(table_starts)] = table_starts

    def unbind(self) -> None:
        """Does nothing, since the kernels' buffers are kept."""

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[Any], SlotLayer]:
        return SlotLayer
