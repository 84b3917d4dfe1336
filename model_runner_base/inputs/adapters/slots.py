"""Matrices of all slots on the device, and writing an adapter into one of them, by functions made at start-up.

vLLM's layers write slices of a slot, whose sizes depend on the adapter's rank and on the slot. A device that compiles
would make a graph for each. Here a layer writes one slot on the host, padded to the largest rank, and the whole slot
goes to the device. So a few functions, one for each shape of matrix, write adapters of any rank into any slot.
``Products`` are the matmuls with these matrices.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import StepFunction, WrapFunction

STACKS = ("lora_a_stacked", "lora_b_stacked")
"""Attributes of vLLM's layers with the matrices of all slots: a tensor, or a tuple with one for each output slice."""


def write_slot(dim: int, stack: torch.Tensor, slot: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns ``stack`` with slot ``slot`` [1] int32 replaced by ``values``, whose length is 1 in dimension ``dim``."""
    along = [1] * values.dim()
    along[dim] = -1
    slots = torch.arange(stack.shape[dim], dtype=slot.dtype, device=slot.device)
    return torch.where((slots == slot).view(along), values, stack)


def write_table(table: torch.Tensor, slot: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns ``table`` [slots * vocabulary, rank] with slot ``slot`` [1] int32 replaced by ``values``.

    ``values``: [vocabulary, rank].
    """
    rows = torch.arange(table.shape[0], dtype=slot.dtype, device=slot.device)
    length = values.shape[0]
    return torch.where((rows // length == slot)[:, None], values[rows % length], table)


class SlotWriter:
    """Writes slots on the device, for all layers."""

    def __init__(self, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._device_ops = device_ops
        functions: dict[str, StepFunction] = {
            "first": partial(write_slot, 0),
            "second": partial(write_slot, 1),
            "third": partial(write_slot, 2),
            "table": write_table,
        }
        self._write: dict[str, StepFunction] = {layout: wrap(function, []) for layout, function in functions.items()}
        """Functions by layout: slots are in one of the first three dimensions, or one after another in a table."""

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device."""
        return self._device_ops.upload(torch.zeros(*shape, dtype=dtype))

    def write(self, stack: torch.Tensor, slot: int, values: torch.Tensor, layout: str) -> None:
        """Writes ``values``, on the host, of ``stack``'s dtype and layout, into a slot; graphs still hold ``stack``."""
        assert values.dtype == stack.dtype, f"{values.dtype} for a stack of {stack.dtype}"
        self._device_ops.overwrite(stack, self._written(stack, slot, values, layout))

    def warm_up(self, stack: torch.Tensor, values: torch.Tensor, layout: str) -> None:
        """Makes the function that writes such a slot, and changes nothing."""
        self._written(stack, 0, values, layout)

    def _written(self, stack: torch.Tensor, slot: int, values: torch.Tensor, layout: str) -> torch.Tensor:
        where = self._device_ops.to_device(np.array([slot], np.int32))
        return self._write[layout](stack, where, self._device_ops.upload(values))


class SlotLayer:
    """A LoRA layer as vLLM's manager writes it; the model runs the layer itself.

    This base class writes slots as vLLM's layer does.
    """

    def __init__(self, layer: BaseLayerWithLoRA) -> None:
        self.layer: Any = layer

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Puts an adapter's matrices into a slot: of the adapter's own rank, and whole even if ranks share a layer."""
        self.layer.set_lora(index, lora_a, lora_b)

    def reset_lora(self, index: int) -> None:
        """Clears a slot, so that it adds nothing."""
        self.layer.reset_lora(index)

    def warm_up(self) -> None:
        """Runs once the functions that write a slot."""

    def products_memory(self, num_tokens: int, num_logits: int) -> int:
        """Bytes of the layer's products in the largest step; 0 if a run of that step measures them."""
        return 0

    def write_memory(self) -> int:
        """Bytes that writing a slot takes."""
        return 0

    def slots_memory(self) -> int:
        """Bytes of the matrices of all slots."""
        stacks = (getattr(self.layer, name) for name in STACKS)
        return sum(stack.nbytes for each in stacks for stack in (each if isinstance(each, tuple) else (each,)))


class SlottedLayer(SlotLayer):
    """A LoRA layer whose matrices have the layout of the masked products (``punica.py``) and are written by slots."""

    def __init__(self, layer: BaseLayerWithLoRA, num_slots: int, writer: SlotWriter) -> None:
        super().__init__(layer)
        self._writer = writer
        self._is_embedding = isinstance(layer, VocabParallelEmbeddingWithLoRA)
        self._is_sliced = isinstance(self.layer.lora_a_stacked, tuple)
        stacks = {name: getattr(self.layer, name) for name in STACKS}
        self._like = {
            name: [(1, *stack.shape[1:]) for stack in (each if self._is_sliced else (each,))]
            for name, each in stacks.items()
        }
        """Shapes of one slot in the layout of vLLM's layer."""
        self._dtype = (stacks[STACKS[0]][0] if self._is_sliced else stacks[STACKS[0]]).dtype
        self._on_device = {name: self._make(name, num_slots) for name in STACKS}
        self._num_slots = num_slots
        self._is_zero = [True] * num_slots
        self._put(self._on_device)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        host = self._zeros()
        self._put(host)
        try:
            self.layer.set_lora(0, lora_a, lora_b)
        finally:
            self._put(self._on_device)
        self._send(index, host)
        self._is_zero[index] = False

    def reset_lora(self, index: int) -> None:
        if not self._is_zero[index]:
            self._send(index, self._zeros())
            self._is_zero[index] = True

    def warm_up(self) -> None:
        self._each(self._zeros(), self._writer.warm_up)

    def products_memory(self, num_tokens: int, num_logits: int) -> int:
        """Bytes of the layer's products: ``x A`` of all slots, masked, scaled; ``x A B``, concatenated, added."""
        num_inputs = num_logits if isinstance(self.layer, LogitsProcessorWithLoRA) else num_tokens
        stacks = self._on_device["lora_b_stacked"]  # [slots, rank, out] each
        shrunk, added = (sum(math.prod(s.shape[part]) for s in stacks) for part in (slice(0, 2), slice(2, 3)))
        return num_inputs * 3 * (shrunk + added) * torch.float32.itemsize

    def write_memory(self) -> int:
        """Bytes of the layer's largest stack, which a write copies, and of one slot of it."""
        largest = max(stack.nbytes for stacks in self._on_device.values() for stack in stacks)
        return largest + largest // self._num_slots

    def _zeros(self) -> dict[str, list[torch.Tensor]]:
        """Zeros of one slot, on the host."""
        return {name: [torch.zeros(shape, dtype=self._dtype) for shape in self._like[name]] for name in STACKS}

    def _put(self, stacks: dict[str, list[torch.Tensor]]) -> None:
        """Sets these as the layer's matrices."""
        for name, each in stacks.items():
            setattr(self.layer, name, tuple(each) if self._is_sliced else each[0])
        if self._is_embedding:
            (self.layer.lora_a_stacked_2d,) = self._on_device["lora_a_stacked"]

    def _send(self, index: int, host: dict[str, list[torch.Tensor]]) -> None:
        """Sends one slot from the host to the device."""
        self._each(host, lambda stack, values, layout: self._writer.write(stack, index, values, layout))

    def _each(
        self, host: dict[str, list[torch.Tensor]], function: Callable[[torch.Tensor, torch.Tensor, str], None]
    ) -> None:
        """Calls ``function`` with each stack, a slot of it in the products' layout, and the layout's name."""
        for name in STACKS:
            for stack, values in zip(self._on_device[name], host[name], strict=True):
                function(stack, *self._laid(name, values))

    def _laid(self, name: str, values: torch.Tensor) -> tuple[torch.Tensor, str]:
        """One slot in the products' layout, and the layout's name."""
        if name == "lora_b_stacked":
            return values[0].transpose(1, 2).contiguous(), "first"  # [1, rank, out]
        if self._is_embedding:
            return values[0], "table"  # [vocabulary, rank]
        return values[0].permute(2, 0, 1).contiguous(), "second"  # [in, 1, rank]

    def _make(self, name: str, num_slots: int) -> list[torch.Tensor]:
        """Zeros on the device, for all slots."""
        stacks = []
        for values in self._zeros()[name]:
            laid, layout = self._laid(name, values)
            shape = list(laid.shape)
            shape[layout == "second"] *= num_slots
            stacks.append(self._writer.make(shape, laid.dtype))
        return stacks


NO_SLOT = -1
"""Slot of a token whose request has no adapter."""


class Products(Protocol):
    """LoRA matmuls of one punica wrapper, which vLLM's LoRA layers call."""

    vocab_size: int
    """Number of rows in an embedding's table."""

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        """Binds the slots [T] of the step's tokens and [L] of its logits rows: int32, ``NO_SLOT`` for no adapter.

        Part of the graph, before the model.
        """

    def unbind(self) -> None:
        """Releases the tensors that ``bind`` computed, which must not outlive the graph's tracing.

        Called when the model has run, its logits included.
        """

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[Any], SlotLayer]:
        """Returns a function that makes what writes a layer's slots in these products' layout.

        Its argument is one of vLLM's LoRA layers, or the ``NamedExperts`` that the products serve (``experts.py``).
        """
