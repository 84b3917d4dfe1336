"""The products that vLLM's LoRA layers ask for, in plain torch: every slot's, masked by the slot of each token.

vLLM's layers keep the matrices of ``max_loras`` adapters in slots and call a "punica wrapper" (``vllm/lora``) to add
``x A B`` of each token's own adapter to their output. This one multiplies by the matrices of all slots at once and
leaves out, by a mask, what is not the token's: no shape and no branch depends on which adapters a batch has, so one
graph serves every batch, and a token without an adapter adds zero.

Example: two slots of rank 2, three tokens, of which the first has the adapter in slot 1, the second none, the third
that in slot 0. ``x A`` has four numbers a token; the mask keeps of them

    token 0   . . x x
    token 1   . . . .
    token 2   x x . .

Matrices lie as the products want them (``slots.py``): A of a linear layer [in, slots, rank], B [slots, rank, out].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from model_runner_base.adapters.slots import SlotLayer, SlottedLayer, SlotWriter
from model_runner_base.device_ops import DeviceOps
from model_runner_base.graphs.policy import WrapFunction
from model_runner_base.vllm_compat.probes.lora import embeddings_indices


class MaskedPunicaWrapper(PunicaWrapperBase):
    """Functional: returns what others write in place, for platforms whose ``can_update_inplace`` is False.

    ``bind`` says which slot each token and each row of logits has; part of the graph, as what follows.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, *, lora_config: Any) -> None:
        # The buffers that the base class would make are for kernels.
        self._num_slots: int = lora_config.max_loras
        self.vocab_size = 0
        self.unbind()

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        self._token_mask = self._mask(token_slots)
        self._logits_mask = self._mask(logits_slots)
        # What VocabParallelEmbeddingWithLoRA adds to a token's id to find its row among all slots' tables.
        first_rows = token_slots.clamp(min=0) * self.vocab_size
        self._embeddings_indices = embeddings_indices(first_rows)  # type: ignore[assignment]

    def unbind(self) -> None:
        self._token_mask = self._logits_mask = self._embeddings_indices = None  # type: ignore[assignment]

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[BaseLayerWithLoRA], SlotLayer]:
        return partial(SlottedLayer, num_slots=self._num_slots, writer=SlotWriter(wrap, device_ops))

    def _mask(self, slots: torch.Tensor) -> torch.Tensor:
        """[N, slots, 1] bool"""
        every = torch.arange(self._num_slots, dtype=slots.dtype, device=slots.device)
        return (slots[:, None] == every)[:, :, None]

    # ---- The products, named as vLLM's layers call them ----

    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[slices, T, rank]: ``x`` [T, in] by the token's own A of each slice. ``y`` is not read."""
        return torch.stack(
            [_masked(x, a, self._token_mask).sum(1, dtype=torch.float32) * scale for a in lora_a_stacked]
        )

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``y`` [T, out] and, in its columns from ``offset_start`` on, slice by slice, ``x`` [slices, T, rank] by B."""
        added = [_expand(part, b, self._token_mask) for part, b in zip(x, lora_b_stacked, strict=True)]
        behind = y.shape[-1] - offset_start - sum(part.shape[-1] for part in added)
        if offset_start or behind:
            columns = (y.new_zeros(y.shape[0], offset_start), *added, y.new_zeros(y.shape[0], behind))
            return y + torch.cat([part.to(y.dtype) for part in columns], dim=-1)
        return y + torch.cat(added, dim=-1).to(y.dtype)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """``y`` [T, hidden] and ``x`` [T, rank], which was looked up in A, by B."""
        return y + _expand(x, lora_b_stacked, self._token_mask).to(y.dtype)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``y`` [T, out] and ``x`` [T, in] by A by B, slice by slice of the columns."""
        shrunk = [_masked(x, a, self._token_mask).flatten(1) * scale for a in lora_a_stacked]
        added = [h @ b.flatten(0, 1) for h, b in zip(shrunk, lora_b_stacked, strict=True)]
        return y + torch.cat(added, dim=-1).to(y.dtype)

    def apply_lora_full_linear(self, *args: Any) -> None:
        """Only heads that classify are replaced as a whole, by newer releases of vLLM."""
        raise NotImplementedError("adapters of heads that classify are not supported")

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``y`` [L, vocabulary, padding perhaps] and ``x`` [L, hidden] by A by B."""
        added = (_masked(x, lora_a_stacked, self._logits_mask).flatten(1) * scale) @ lora_b_stacked.flatten(0, 1)
        if padding := y.shape[-1] - added.shape[-1]:
            added = torch.nn.functional.pad(added, (0, padding))
        return y + added.to(y.dtype)


def _masked(x: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[T, slots, rank]: ``x`` [T, in] by the A of all slots, zero where it is not the token's."""
    return torch.where(mask, (x.to(a.dtype) @ a.flatten(1)).unflatten(-1, a.shape[1:]), 0)


def _expand(x: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[T, out]: ``x`` [T, rank] by the token's own B."""
    spread = torch.where(mask, x.to(b.dtype)[:, None, :], 0).flatten(1)
    return spread @ b.flatten(0, 1)
