"""What the products of vLLM's LoRA layers are told of a step, and how they have an adapter written into a slot."""

from collections.abc import Callable
from typing import Protocol

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from model_runner_base.adapters.slots import SlotLayer
from model_runner_base.device_ops import DeviceOps
from model_runner_base.graphs.policy import WrapFunction

NO_SLOT = -1
"""Of a token whose request has no adapter."""


class Products(Protocol):
    """Those of one punica wrapper, as vLLM calls what its layers multiply by."""

    vocab_size: int
    """Rows of an embedding's table."""

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        """Slots [T] of the step's tokens and [L] of its rows of logits, int32, ``NO_SLOT`` where there is none.

        Part of the graph, ahead of the model.
        """

    def unbind(self) -> None:
        """The model has run, its logits included: nothing that a graph computed outlives its tracing."""

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[BaseLayerWithLoRA], SlotLayer]:
        """Returns what makes of each of vLLM's layers one whose slots are written as these products want them."""
