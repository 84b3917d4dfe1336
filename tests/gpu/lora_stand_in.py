"""vLLM's LoRA kernels in plain torch, where Triton's interpreter does not run them: in float32, too.

They go by the same buffers as the kernels: one program a slot, which finds its adapter and its tokens there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.lora.ops.triton_ops import utils
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu
from vllm.triton_utils import HAS_TRITON

from model_runner_base.inputs.adapters.kernels import KernelProducts

Fixed = Callable[[Callable[[], Any]], Any]
"""Function that gives what a kernel is launched with; a graph keeps what it was captured with."""


class Kernels:
    """Kernels ``shrink`` and ``expand``, with the arguments of vLLM's operators of these names."""

    def __init__(self, fixed: Fixed) -> None:
        self._fixed = fixed

    def _programs(
        self,
        token_lora_mapping: torch.Tensor,
        token_indices: torch.Tensor,
        num_tokens: torch.Tensor,
        starts: torch.Tensor,
        lora_ids: torch.Tensor,
        no_lora_flag: torch.Tensor,
        num_active: int,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Slot and tokens of each program that a launch has."""
        is_skipped, count = self._fixed(lambda: (no_lora_flag.item(), int(num_active)))
        assert len(token_lora_mapping) == len(token_indices)
        for program in range(0 if is_skipped else count):
            slot, start = int(lora_ids[program]), int(starts[program])
            if slot != -1:
                yield slot, token_indices[start : start + int(num_tokens[program])].long()

    def shrink(self, x: torch.Tensor, matrices: Any, y: torch.Tensor, *rest: Any) -> None:
        *meta, scale = rest
        assert x.is_contiguous() and y.is_contiguous() and x.dtype == matrices[0].dtype and len(x) == len(meta[0])
        y.zero_()
        for slot, tokens in self._programs(*meta):
            for part, a in zip(y, matrices, strict=True):
                part[tokens] += (x[tokens] @ a[slot, 0].T).float() * scale

    def expand(
        self,
        x: torch.Tensor,
        matrices: Any,
        y: torch.Tensor,
        *meta: Any,
        offset_start: int = 0,
        add_inputs: bool = False,
    ) -> None:
        assert y.is_contiguous() and x.shape[1] == len(meta[0]) and add_inputs
        for slot, tokens in self._programs(*meta):
            start = offset_start
            for part, b in zip(x, matrices, strict=True):
                columns = slice(start, start + b.shape[2])
                y[tokens, columns] += part[tokens].to(b.dtype) @ b[slot, 0].T
                start += b.shape[2]


def replace_kernels(fixed: Fixed) -> None:
    """Replaces vLLM's kernels. Triton's interpreter keeps them, but adds up a product in one program instead of 64."""
    if HAS_TRITON:
        utils.is_batch_invariant = True
        return
    kernels: Any = Kernels(fixed)
    punica_gpu.LoRAKernelMeta = LoRAKernelMeta
    punica_gpu.lora_shrink, punica_gpu.lora_expand = kernels.shrink, kernels.expand
    KernelProducts.dtypes = (torch.float32,)
