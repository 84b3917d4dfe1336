"""LoRA products in plain torch: all slots are multiplied, and a mask keeps the slot of each token.

vLLM's layers keep the matrices of ``max_loras`` adapters in slots. They call a "punica wrapper" (``vllm/lora``), which
adds ``x A B`` of each token's own adapter to their output. This wrapper multiplies by the matrices of all slots at
once, and masks the results of other slots. No shape and no branch depends on which adapters a batch has, so one graph
serves every batch. A token without an adapter adds zero.

Example: two slots of rank 2 and three tokens. The first token has the adapter in slot 1, the second none, the third the
one in slot 0. ``x A`` has four numbers a token, of which the mask keeps

    token 0   . . x x
    token 1   . . . .
    token 2   x x . .

Matrices have the products' layout (``slots.py``): A of a linear layer is [in, slots, rank], B is [slots, rank, out].
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.adapters.experts import ExpertsSlots, NamedExperts
from model_runner_base.inputs.adapters.latents import slotted_class
from model_runner_base.inputs.adapters.slots import SlotLayer, SlotWriter
from model_runner_base.step.graph_policy import WrapFunction


def embeddings_indices(table_starts: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``table_starts`` [T] of each token's table, in the form in which embeddings read them.

    In releases whose adapters could bring tokens of their own, that is two equal tensors. Those releases have no
    ``apply_lora_full_linear``.
    """
    return table_starts if hasattr(PunicaWrapperBase, "apply_lora_full_linear") else (table_starts, table_starts)


class MaskedPunicaWrapper(PunicaWrapperBase):
    """Products that return new tensors, for platforms whose ``can_update_inplace`` is False.

    ``bind`` sets the slot of each token and of each logits row. It is a part of the graph, as are the products.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, *, lora_config: Any) -> None:
        # The base class would make buffers, but those are for kernels.
        self._lora_config, self._num_slots = lora_config, int(lora_config.max_loras)
        self.vocab_size = 0
        self.unbind()

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        self._token_mask = self._mask(token_slots)
        self._logits_mask = self._mask(logits_slots)
        # VocabParallelEmbeddingWithLoRA adds these to the tokens' ids to find their rows in the tables of all slots.
        table_starts = token_slots.clamp(min=0) * self.vocab_size
        self._embeddings_indices = embeddings_indices(table_starts)  # type: ignore[assignment]

    def unbind(self) -> None:
        self._token_mask = self._logits_mask = self._embeddings_indices = None  # type: ignore[assignment]

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[Any], SlotLayer]:
        writer = SlotWriter(wrap, device_ops)

        def make(layer: BaseLayerWithLoRA | NamedExperts) -> SlotLayer:
            if isinstance(layer, NamedExperts):
                return ExpertsSlots(layer, self._lora_config, writer, self)
            return slotted_class(layer)(layer, self._num_slots, writer)

        return make

    def _mask(self, slots: torch.Tensor) -> torch.Tensor:
        """Mask [N, slots, 1] bool that is True at each token's own slot."""
        every = torch.arange(self._num_slots, dtype=slots.dtype, device=slots.device)
        return (slots[:, None] == every)[:, :, None]

    @property
    def is_own_slot(self) -> torch.Tensor:
        """[T, slots] bool, True at each token's own slot."""
        return self._token_mask[:, :, 0]

    def own_slots(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros ``x`` [T, heads, slots, rank] at other slots than the token's."""
        return torch.where(self._token_mask[:, None], x, 0)

    # ---- The products, named as vLLM's layers call them ----

    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Multiplies ``x`` [T, in] by the token's own A of each slice: [slices, T, rank]. ``y`` is not read."""
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
        """Adds ``x`` [slices, T, rank] by B to ``y`` [T, out], slice by slice, in columns from ``offset_start`` on."""
        added = [_expand(part, b, self._token_mask) for part, b in zip(x, lora_b_stacked, strict=True)]
        num_after = y.shape[-1] - offset_start - sum(part.shape[-1] for part in added)
        if offset_start or num_after:
            columns = (y.new_zeros(y.shape[0], offset_start), *added, y.new_zeros(y.shape[0], num_after))
            return y + torch.cat([part.to(y.dtype) for part in columns], dim=-1)
        return y + torch.cat(added, dim=-1).to(y.dtype)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Adds ``x`` [T, rank], which was looked up in A, by B to ``y`` [T, hidden]."""
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
        """Adds ``x`` [T, in] by A by B to ``y`` [T, out], slice by slice of the columns."""
        shrunk = [_masked(x, a, self._token_mask).flatten(1) * scale for a in lora_a_stacked]
        added = [h @ b.flatten(0, 1) for h, b in zip(shrunk, lora_b_stacked, strict=True)]
        return y + torch.cat(added, dim=-1).to(y.dtype)

    def apply_lora_full_linear(self, *args: Any) -> None:
        """Raises NotImplementedError: newer releases of vLLM call this for heads that classify, and only for those."""
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
        """Adds ``x`` [L, hidden] by A by B to ``y`` [L, vocabulary], whose last columns may be padding."""
        added = (_masked(x, lora_a_stacked, self._logits_mask).flatten(1) * scale) @ lora_b_stacked.flatten(0, 1)
        if padding := y.shape[-1] - added.shape[-1]:
            added = torch.nn.functional.pad(added, (0, padding))
        return y + added.to(y.dtype)


def _masked(x: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Multiplies ``x`` [T, in] by the A of all slots: [T, slots, rank], zero at other slots than the token's."""
    return torch.where(mask, (x.to(a.dtype) @ a.flatten(1)).unflatten(-1, a.shape[1:]), 0)


def _expand(x: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Multiplies ``x`` [T, rank] by the token's own B: [T, out]."""
    spread = torch.where(mask, x.to(b.dtype)[:, None, :], 0).flatten(1)
    return spread @ b.flatten(0, 1)
